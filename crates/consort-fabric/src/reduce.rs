//! The arithmetic of reductions. For each element, the members' values are taken in member order, whatever the algorithm and
//! however the values arrive, so that all members hold the same bits and two runs give the same result.

use crate::element::Element;

/// How values are brought together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    /// The largest; a value that is no number loses against any that is.
    Max,
}

/// Values that are worked on at a time: three such runs stay in the first-level cache.
const BLOCK: usize = 1024;

/// `values` becomes the reduction of all members' values. This member is the one at `own` of `members`; what another has sent is
/// `theirs(position)`, values of kind `W`, as many as there are in `values`. Its own values are rounded to `W` as theirs were.
pub(crate) fn reduce<'a, V: Element, W: Element>(
    reduction: Reduction,
    values: &mut [V],
    own: usize,
    members: usize,
    theirs: impl Fn(usize) -> &'a [u8],
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { with_avx2::<V, W>(reduction, values, own, members, theirs) };
    }
    dispatch::<V, W>(reduction, values, own, members, theirs);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<'a, V: Element, W: Element>(
    reduction: Reduction,
    values: &mut [V],
    own: usize,
    members: usize,
    theirs: impl Fn(usize) -> &'a [u8],
) {
    dispatch::<V, W>(reduction, values, own, members, theirs);
}

#[inline(always)]
fn dispatch<'a, V: Element, W: Element>(
    reduction: Reduction,
    values: &mut [V],
    own: usize,
    members: usize,
    theirs: impl Fn(usize) -> &'a [u8],
) {
    match reduction {
        Reduction::Sum => in_order::<V, W>(values, own, members, theirs, |one, other| one + other),
        Reduction::Max => {
            in_order::<V, W>(
                values,
                own,
                members,
                theirs,
                |one, other| {
                    if other > one || one.is_nan() { other } else { one }
                },
            )
        }
    }
}

#[inline(always)]
fn in_order<'a, V: Element, W: Element>(
    values: &mut [V],
    own: usize,
    members: usize,
    theirs: impl Fn(usize) -> &'a [u8],
    join: impl Fn(f32, f32) -> f32,
) {
    let round = |value: V| W::narrow(value.widen()).widen();
    if members == 2 {
        let other = theirs(1 - own).chunks_exact(size_of::<W>()).map(|bytes| W::read(bytes).widen());
        for (value, other) in values.iter_mut().zip(other) {
            let joined = if own == 0 { join(round(*value), other) } else { join(other, round(*value)) };
            *value = V::narrow(joined);
        }
        return;
    }
    let mut total = [0.0f32; BLOCK];
    for (block, values) in values.chunks_mut(BLOCK).enumerate() {
        let total = &mut total[..values.len()];
        for position in 0..members {
            if position == own {
                let addends = values.iter().map(|&value| round(value));
                add(total, addends, position == 0, &join);
            } else {
                let bytes = &theirs(position)[block * BLOCK * size_of::<W>()..][..values.len() * size_of::<W>()];
                let addends = bytes.chunks_exact(size_of::<W>()).map(|bytes| W::read(bytes).widen());
                add(total, addends, position == 0, &join);
            }
        }
        values.iter_mut().zip(&*total).for_each(|(value, &total)| *value = V::narrow(total));
    }
}

#[inline(always)]
fn add(total: &mut [f32], addends: impl Iterator<Item = f32>, first: bool, join: &impl Fn(f32, f32) -> f32) {
    if first {
        total.iter_mut().zip(addends).for_each(|(total, addend)| *total = addend);
    } else {
        total.iter_mut().zip(addends).for_each(|(total, addend)| *total = join(*total, addend));
    }
}

/// Values on the wire: `V`s as `W`s, into the start of `bytes`.
pub(crate) fn encode<V: Element, W: Element>(values: &[V], bytes: &mut [u8]) {
    for (value, bytes) in values.iter().zip(bytes.chunks_exact_mut(size_of::<W>())) {
        bytes.copy_from_slice(W::bytes(&[W::narrow(value.widen())]));
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::element::Plain;

    #[test]
    fn sums_follow_member_order() {
        // In another order, or with the big values first cancelled, the small one would survive.
        for own in 0..3 {
            let all: Vec<Vec<f32>> = [1e30f32, 1.0, -1e30].map(|value| vec![value; 2000]).into();
            let mut values = all[own].clone();
            reduce::<f32, f32>(Reduction::Sum, &mut values, own, 3, |position| f32::bytes(&all[position]));
            assert!(values.iter().all(|&value| value == 0.0));
        }
    }

    #[test]
    fn every_member_gets_the_same_bits() {
        for members in 2..6 {
            let value = |member: usize, at: usize| ((at * 37 + member * 101) % 1009) as f32 * 1.37e-3;
            let all: Vec<Vec<f32>> =
                (0..members).map(|member| (0..1500).map(|at| value(member, at)).collect()).collect();
            let wire: Vec<Vec<u8>> = (0..members)
                .map(|member| {
                    let mut bytes = vec![0; 3000];
                    encode::<f32, bf16>(&all[member], &mut bytes);
                    bytes
                })
                .collect();
            let rounded = |member: usize, at: usize| bf16::from_f32(value(member, at)).to_f32();
            for own in 0..members {
                let (mut plain, mut short, mut most) = (all[own].clone(), all[own].clone(), all[own].clone());
                reduce::<f32, f32>(Reduction::Sum, &mut plain, own, members, |position| f32::bytes(&all[position]));
                reduce::<f32, bf16>(Reduction::Sum, &mut short, own, members, |position| &wire[position]);
                reduce::<f32, f32>(Reduction::Max, &mut most, own, members, |position| f32::bytes(&all[position]));
                for at in 0..1500 {
                    let sum =
                        |value: &dyn Fn(usize) -> f32| (1..members).fold(value(0), |sum, member| sum + value(member));
                    assert_eq!(plain[at], sum(&|member| value(member, at)));
                    assert_eq!(short[at], sum(&|member| rounded(member, at)));
                    assert_eq!(most[at], (0..members).map(|member| value(member, at)).fold(0.0, f32::max));
                }
            }
        }
    }
}
