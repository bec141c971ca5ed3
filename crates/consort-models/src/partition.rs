//! Who holds which part of a weight.
//!
//! Each axis of a model (heads, feed-forward features, vocabulary, experts) is divided once, in whole units, into one range
//! per shard. The weights that lie along an axis then follow its division, so that neither a gap nor an overlap can be
//! expressed. Divisions may be uneven.

use std::ops::Range;

/// Divides `units` into one consecutive range per share, in proportion to `shares` (largest remainder; the earlier share wins
/// ties). With at least as many units as shares, nobody goes empty.
pub fn split(units: usize, shares: &[usize]) -> Vec<Range<usize>> {
    let total: usize = shares.iter().sum();
    let mut counts: Vec<usize> = shares.iter().map(|s| units * s / total).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse((units * shares[i]) % total));
    let missing = units - counts.iter().sum::<usize>();
    for &i in order.iter().cycle().take(missing) {
        counts[i] += 1;
    }
    while units >= shares.len()
        && let Some(empty) = counts.iter().position(|&n| n == 0)
    {
        let largest = (0..counts.len()).max_by_key(|&i| counts[i]).expect("there is at least one share");
        counts[largest] -= 1;
        counts[empty] += 1;
    }
    let mut start = 0;
    counts
        .into_iter()
        .map(|n| {
            start += n;
            start - n..start
        })
        .collect()
}

/// Multiplies a range of units into a range of features.
pub fn scaled(range: &Range<usize>, unit: usize) -> Range<usize> {
    range.start * unit..range.end * unit
}

/// One shard's attention heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadShare {
    /// Query heads.
    pub heads: Range<usize>,
    /// The KV heads that they read; a KV head that several shards need is held by each of them.
    pub kv_heads: Range<usize>,
    /// For each query head of the share its KV head, counted from `kv_heads.start`.
    pub kv_head_of: Vec<u32>,
}

/// Divides `heads` query heads with `kv_heads` KV heads among shards. With at least as many KV heads as shards, whole KV
/// groups are dealt out; otherwise query heads are, and the KV heads that they share are replicated.
///
/// # Errors
/// When a shard would hold no head: the message names the numbers.
pub fn split_heads(heads: usize, kv_heads: usize, shares: &[usize]) -> Result<Vec<HeadShare>, String> {
    let (shards, group) = (shares.len(), heads / kv_heads);
    if shards > heads {
        return Err(format!("{shards} shards for {heads} attention heads; use at most {heads}"));
    }
    let ranges: Vec<Range<usize>> = if shards <= kv_heads {
        split(kv_heads, shares).iter().map(|r| scaled(r, group)).collect()
    } else if shards % kv_heads == 0 && shards / kv_heads <= group {
        // Each KV group is divided among its own shards, so that no shard needs a second KV head.
        let per_group = shards / kv_heads;
        let within = |kv: usize| split(group, &shares[kv * per_group..(kv + 1) * per_group]);
        (0..kv_heads)
            .flat_map(|kv| within(kv).into_iter().map(move |r| kv * group + r.start..kv * group + r.end))
            .collect()
    } else {
        split(heads, shares)
    };
    Ok(ranges
        .into_iter()
        .map(|heads| {
            let kv_heads = heads.start / group..(heads.end - 1) / group + 1;
            let kv_head_of = heads.clone().map(|h| (h / group - kv_heads.start) as u32).collect();
            HeadShare { heads, kv_heads, kv_head_of }
        })
        .collect())
}

impl HeadShare {
    /// `None` when the share has the regular grouping (equal consecutive runs of query heads per KV head).
    pub fn irregular(&self) -> Option<&[u32]> {
        let (heads, kv_heads) = (self.kv_head_of.len(), self.kv_heads.len());
        let regular = heads % kv_heads == 0
            && self.kv_head_of.iter().enumerate().all(|(i, &kv)| kv as usize == i / (heads / kv_heads));
        (!regular).then_some(&self.kv_head_of)
    }
}

/// Divides `features` in multiples of `unit` (a quantization block or the block of activation rounding), so that a cut never
/// lies inside a unit. A last unit may be short.
///
/// # Errors
/// When there are fewer units than shards: the message names the numbers.
pub fn split_features(what: &str, features: usize, unit: usize, shares: &[usize]) -> Result<Vec<Range<usize>>, String> {
    let units = features.div_ceil(unit);
    if units < shares.len() {
        let shards = shares.len();
        return Err(format!("{what} of {features} has {units} blocks of {unit}, too few for {shards} shards"));
    }
    Ok(split(units, shares).iter().map(|r| r.start * unit..(r.end * unit).min(features)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn covers(ranges: &[Range<usize>], units: usize) -> bool {
        ranges.iter().try_fold(0, |next, r| (next == r.start).then_some(r.end)) == Some(units)
    }

    proptest! {
        #[test]
        fn a_split_is_an_exact_cover(units in 0usize..5000, shares in prop::collection::vec(1usize..100, 1..64)) {
            let ranges = split(units, &shares);
            prop_assert!(covers(&ranges, units));
            if units >= shares.len() {
                prop_assert!(ranges.iter().all(|r| !r.is_empty()));
            }
        }

        #[test]
        fn every_query_head_is_held_once_with_its_own_kv_head(kv in 1usize..20, group in 1usize..20, shards in 1usize..64) {
            let heads = kv * group;
            match split_heads(heads, kv, &vec![1; shards]) {
                Err(_) => prop_assert!(shards > heads),
                Ok(shares) => {
                    prop_assert!(covers(&shares.iter().map(|s| s.heads.clone()).collect::<Vec<_>>(), heads));
                    for share in shares {
                        for (head, &local) in share.heads.clone().zip(&share.kv_head_of) {
                            prop_assert_eq!(share.kv_heads.start + local as usize, head / group);
                            prop_assert!((local as usize) < share.kv_heads.len());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn shares_follow_memory() {
        // A node with two thirds of the memory gets its part but never all; tiny nodes still get one unit.
        assert_eq!(split(20, &[975, 12, 13]).iter().map(|r| r.len()).collect::<Vec<_>>(), [18, 1, 1]);
        assert_eq!(split(3, &[2, 1]).iter().map(|r| r.len()).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn kv_heads_are_replicated_when_shards_outnumber_them() {
        let shares = split_heads(32, 4, &[1; 8]).unwrap();
        assert_eq!((shares[5].kv_heads.clone(), shares[5].heads.clone()), (2..3, 20..24));
        assert_eq!(split_heads(9, 3, &[1; 2]).unwrap().iter().map(|s| s.kv_heads.len()).collect::<Vec<_>>(), [2, 1]);
        let uneven = split_heads(8, 2, &[1; 3]).unwrap();
        assert_eq!(uneven[1].kv_head_of, [0, 1, 1]);
        assert!(split_heads(4, 2, &[1; 5]).unwrap_err().contains("5 shards for 4"));
    }

    #[test]
    fn blocks_are_never_cut() {
        assert_eq!(split_features("width", 1536, 32, &[1, 1]).unwrap(), [0..768, 768..1536]);
        assert_eq!(split_features("width", 576, 256, &[1, 1]).unwrap(), [0..512, 512..576]);
        assert!(split_features("width", 512, 256, &[1; 3]).unwrap_err().contains("2 blocks of 256"));
        // Widths whose even parts would end inside FP8 blocks of 128: moved to blocks, or refused with both numbers.
        let lengths = |width: usize, shards: usize| -> Result<Vec<usize>, String> {
            Ok(split_features("width", width, 128, &vec![1; shards])?.iter().map(|part| part.len()).collect())
        };
        assert_eq!(lengths(768, 4).unwrap(), [256, 256, 128, 128]);
        assert_eq!(lengths(18432, 32).unwrap(), [&[640; 16][..], &[512; 16]].concat());
        assert_eq!(lengths(512, 8).unwrap_err(), "width of 512 has 4 blocks of 128, too few for 8 shards");
    }
}
