//! Every vector operation on every instruction set, held to the portable one, bit by bit: on ordinary numbers, on all codes, and
//! where rounding ties, overflows or meets what is not a number.

mod common;

use std::collections::BTreeMap;

use common::Random;
use consort_cpu::isa::{CENTER, Isa, Kernel, LANES, Quads, Simd};

/// Results by the name of the operation, as the bits of the numbers that it gave.
type Results = BTreeMap<&'static str, Vec<u32>>;

/// Numbers and bytes that operations are applied to.
struct Operands {
    floats: [[f32; LANES]; 2],
    /// Whole numbers from -126 to 127.
    whole: [f32; LANES],
    bytes: Quads,
    /// Bytes below 16.
    nibbles: Quads,
    table: [u8; 16],
}

struct Operations<'a>(&'a Operands);

/// The bits of numbers; all that are not numbers are alike.
fn bits(floats: [f32; LANES]) -> impl Iterator<Item = u32> {
    floats.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() })
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.iter().map(|&byte| byte.into())
}

/// 16-bit numbers of which those with all bits of `exponent` and more are not numbers, and alike.
fn halves(bytes: &[u8; 2 * LANES], exponent: u16) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(move |&half| {
        let half = u16::from_le_bytes(half);
        u32::from(if half & 0x7FFF > exponent { u16::MAX } else { half })
    })
}

impl Kernel for Operations<'_> {
    type Output = Results;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Results {
        let Operands { floats, whole, bytes, nibbles, table } = self.0;
        let mut results = Results::new();
        macro_rules! floats {
            ($($name:literal: $value:expr,)*) => {$({
                let mut out = [0.0; LANES];
                simd.store($value, &mut out);
                results.entry($name).or_default().extend(bits(out));
            })*};
        }
        macro_rules! ints {
            ($($name:literal: $value:expr,)*) => { floats! { $($name: simd.to_floats($value),)* } };
        }
        macro_rules! bytes {
            ($($name:literal: $value:expr,)*) => {$({
                let mut out = [0; 4 * LANES];
                simd.store_bytes($value, &mut out);
                results.entry($name).or_default().extend(words(&out));
            })*};
        }

        let [a, b] = [simd.load(&floats[0]), simd.load(&floats[1])];
        floats! {
            "load": a,
            "splat": simd.splat(floats[0][3]),
            "add": simd.add(a, b),
            "mul": simd.mul(a, b),
            "div": simd.div(a, b),
            "max": simd.max(a, b),
            "min": simd.min(a, b),
            "round": simd.round(a),
            "exp2_whole": simd.exp2_whole(simd.load(whole)),
        }
        let (quarters, _) = bytes.as_chunks::<LANES>();
        for quarter in quarters {
            floats! {
                "load_e4m3_div_256": simd.load_e4m3_div_256(quarter),
                "load_u8": simd.load_u8(quarter),
                "load_i8": simd.load_i8(quarter),
                "load_e8m0": simd.load_e8m0(&quarter.map(|code| code.min(254))),
            }
        }
        for half in bytes.as_chunks().0 {
            floats! {
                "load_f16": simd.load_f16(half),
                "load_bf16": simd.load_bf16(half),
            }
        }
        let (mut f16, mut bf16, mut i8) = ([0; 2 * LANES], [0; 2 * LANES], [0; LANES]);
        simd.store_f16(a, &mut f16);
        simd.store_bf16(a, &mut bf16);
        simd.store_i8(simd.load(whole), &mut i8);
        results.entry("store_f16").or_default().extend(halves(&f16, 0x7C00));
        results.entry("store_bf16").or_default().extend(halves(&bf16, 0x7F80));
        results.entry("store_i8").or_default().extend(words(&i8));

        let numbers = floats[0].map(|x| if x.is_finite() { x } else { 1.0 });
        let (sum, largest) = (simd.sum(simd.load(&numbers)), simd.largest(simd.load(&numbers)));
        results.insert("sum", bits([sum; LANES]).collect());
        results.insert("largest", bits([largest; LANES]).collect());

        let rows = std::array::from_fn(|row| std::array::from_fn(|column| (LANES * row + column) as f32));
        let mut columns = [[0.0; LANES]; LANES];
        simd.transpose(&rows, &mut columns);
        results.insert("transpose", columns.into_iter().flat_map(bits).collect());

        let (x, y) = (simd.load_bytes(bytes), simd.load_bytes(nibbles));
        floats! {
            "upper_bf16": simd.upper_bf16(x),
            "lower_bf16": simd.lower_bf16(x),
        }
        let pairs = simd.pairs_of_e4m3(x);
        bytes! {
            "pairs_of_e4m3": pairs[0],
            "pairs_of_e4m3": pairs[1],
        }
        bytes! {
            "load_bytes": x,
            "or": simd.or(x, y),
            "lookup": simd.lookup(table, y),
        }
        for (count, mask) in [(0, 15), (4, 15), (2, 3), (6, 3), (1, 0x30), (3, 1), (7, 1)] {
            bytes! {
                "field": simd.field(x, count, mask),
                "field_left": simd.field_left(x, count, mask << count),
            }
        }
        if S::NIBBLES {
            let table = simd.load(&floats[0]);
            floats! {
                "lookup_nibble": simd.lookup_nibble::<0>(table, x),
                "lookup_nibble": simd.lookup_nibble::<3>(table, x),
                "lookup_nibble": simd.lookup_nibble::<7>(table, x),
            }
        }
        let ints = simd.byte_of_lane::<1>(x);
        ints! {
            "byte_of_lane": simd.byte_of_lane::<0>(x),
            "byte_of_lane": ints,
            "byte_of_lane": simd.byte_of_lane::<2>(x),
            "byte_of_lane": simd.byte_of_lane::<3>(x),
            "splat_int": simd.splat_int(-7),
            "add_ints": simd.add_ints(ints, simd.splat_int(-300)),
        }
        // As many products of the largest bytes as a sum is said to hold, with activations of the largest magnitude.
        for (largest, sign) in [(1, 1), (15, -1), (24, 1), (31, -1), (63, 1), (63, -1)] {
            let w = simd.load_bytes(&bytes.map(|byte| if byte < 128 { largest } else { byte % (largest + 1) }));
            let x = [127, bytes[0] as i8 % 64, 127, 100].map(|x: i8| (sign * x) as u8);
            let start = simd.splat_int(-9);
            let mut sums = simd.start_sums(start);
            for _ in 0..S::sums_hold(largest).min(8) {
                sums = simd.dot_bytes(sums, w, x);
            }
            // The portable sums hold more.
            let mut total = simd.total(sums, start);
            let zero = simd.splat_int(0);
            for _ in S::sums_hold(largest).min(8)..8 {
                total = simd.add_ints(total, simd.total(simd.dot_bytes(simd.start_sums(zero), w, x), zero));
            }
            ints! { "dot_bytes": total, }
        }
        // Bytes of any size less their center, in the way that each set has for them.
        for sign in [1, -1] {
            let x = [127, bytes[1] as i8 % 64, 127, -100].map(|x: i8| sign * x);
            let start = simd.splat_int(-i32::from(CENTER) * x.iter().map(|&x| i32::from(x)).sum::<i32>());
            let (w, quad) = (simd.load_bytes(bytes), x.map(|x| x as u8));
            let products = match S::sums_hold(u8::MAX) {
                0 => simd.dot_centered_bytes(simd.splat_int(0), w, quad),
                _ => simd.total(simd.dot_bytes(simd.start_sums(start), w, quad), start),
            };
            ints! { "dot_centered_bytes": products, }
        }
        results
    }
}

/// Numbers between which rounding to 16 bits is hard to get right, and those that are none.
fn adversarial(random: &mut Random) -> f32 {
    match random.below(8) {
        0 => [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 65504.0][random.below(8)],
        // Halfway between two numbers of bfloat16, and next to it.
        1 => {
            f32::from_bits(((random.next() as u32) << 16 | 0x8000).wrapping_add(random.below(3) as u32).wrapping_sub(1))
        }
        // The same of half precision.
        2 => f32::from_bits(
            ((random.next() as u32) & 0x87FF_E000 | 0x3800_1000).wrapping_add(random.below(3) as u32).wrapping_sub(1),
        ),
        // Too small for half precision, or nearly.
        3 => random.value() * f32::exp2(-14.0 - random.below(12) as f32),
        // Halfway between whole numbers.
        4 => random.below(64) as f32 - 31.5,
        5 => f32::from_bits(random.next() as u32),
        _ => random.value() * 100.0,
    }
}

#[test]
fn every_operation_is_the_portable_one() {
    let mut random = Random(1);
    for round in 0..2000 {
        let mut floats = || std::array::from_fn(|_| adversarial(&mut random));
        let floats = [floats(), floats()];
        let operands = Operands {
            floats,
            whole: std::array::from_fn(|_| random.below(254) as f32 - 126.0),
            bytes: std::array::from_fn(|i| if round < 4 { (64 * round + i) as u8 } else { random.next() as u8 }),
            nibbles: std::array::from_fn(|_| random.next() as u8 % 16),
            table: std::array::from_fn(|_| random.next() as u8),
        };
        let run = |name| Isa::named(name).expect("an instruction set of this machine").run(Operations(&operands));
        let portable = run("portable");
        for isa in Isa::available() {
            for (name, got) in run(isa.name()) {
                assert_eq!(got, portable[name], "{isa} {name} of {floats:?}");
            }
        }
    }
}
