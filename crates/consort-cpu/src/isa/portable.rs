//! Plain arrays: works everywhere, and says what the operations of [`Simd`] mean.

use std::array::from_fn;

use half::{bf16, f16};

use super::{Kernel, LANES, Quads, Simd};

/// The instruction set of the compiler's baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portable;

/// 32 bytes as 16 two-byte numbers.
fn halves(from: &[u8; 2 * LANES]) -> [u16; LANES] {
    from_fn(|lane| u16::from_le_bytes([from[2 * lane], from[2 * lane + 1]]))
}

impl Simd for Portable {
    type Floats = [f32; LANES];
    type Ints = [i32; LANES];
    type Bytes = Quads;
    type Sums = [i32; LANES];

    const NIBBLES: bool = true;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        fn enter<K: Kernel>(portable: Portable, kernel: K) -> K::Output {
            kernel.run(portable)
        }
        enter(self, kernel)
    }

    fn sums_hold(_largest: u8) -> usize {
        usize::MAX
    }

    fn prefetch(self, _bytes: &[u8]) {}
    fn prefetch_early(self, _bytes: &[u8]) {}

    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }
    fn load(self, from: &[f32; LANES]) -> [f32; LANES] {
        *from
    }
    fn store(self, x: [f32; LANES], to: &mut [f32; LANES]) {
        *to = x;
    }
    fn load_f16(self, from: &[u8; 2 * LANES]) -> [f32; LANES] {
        halves(from).map(|bits| f16::from_bits(bits).to_f32())
    }
    fn load_bf16(self, from: &[u8; 2 * LANES]) -> [f32; LANES] {
        halves(from).map(|bits| bf16::from_bits(bits).to_f32())
    }
    fn load_e4m3_div_256(self, from: &[u8; LANES]) -> [f32; LANES] {
        // Read as half precision, whose exponent's bias is larger by 8.
        from.map(|code| f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7F) << 7).to_f32())
    }
    fn load_u8(self, from: &[u8; LANES]) -> [f32; LANES] {
        from.map(f32::from)
    }
    fn load_i8(self, from: &[u8; LANES]) -> [f32; LANES] {
        from.map(|x| f32::from(x as i8))
    }
    fn load_e8m0(self, from: &[u8; LANES]) -> [f32; LANES] {
        from.map(|code| f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 }))
    }

    fn upper_bf16(self, x: Quads) -> [f32; LANES] {
        from_fn(|lane| bf16::from_le_bytes([x[4 * lane + 2], x[4 * lane + 3]]).to_f32())
    }
    fn lower_bf16(self, x: Quads) -> [f32; LANES] {
        from_fn(|lane| bf16::from_le_bytes([x[4 * lane], x[4 * lane + 1]]).to_f32())
    }
    fn pairs_of_e4m3(self, codes: Quads) -> [Quads; 2] {
        let (codes, _) = codes.as_chunks::<LANES>();
        from_fn(|vector| {
            from_fn(|i| {
                let half = i / 2;
                let [number, ..] = self.load_e4m3_div_256(&[codes[half / 8][8 * vector + half % 8]; LANES]);
                bf16::from_f32(number).to_le_bytes()[i % 2]
            })
        })
    }

    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] + b[lane])
    }
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] * b[lane])
    }
    fn div(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] / b[lane])
    }
    fn fma(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        // Without the instruction, a fused product is a call into the C library.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
        } else {
            from_fn(|lane| a[lane] * b[lane] + c[lane])
        }
    }
    fn max(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }
    fn min(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }
    fn transpose(self, from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        *to = from_fn(|row| from_fn(|column| from[column][row]));
    }
    fn to_floats(self, x: [i32; LANES]) -> [f32; LANES] {
        x.map(|x| x as f32)
    }
    fn exp2_whole(self, n: [f32; LANES]) -> [f32; LANES] {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    fn round(self, x: [f32; LANES]) -> [f32; LANES] {
        x.map(f32::round_ties_even)
    }
    fn sum(self, x: [f32; LANES]) -> f32 {
        // Halves, as vector registers are added up.
        let eight: [f32; 8] = from_fn(|i| x[i] + x[i + 8]);
        let four: [f32; 4] = from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    fn largest(self, x: [f32; LANES]) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    fn store_f16(self, x: [f32; LANES], to: &mut [u8; 2 * LANES]) {
        *to = from_fn(|i| f16::from_f32(x[i / 2]).to_le_bytes()[i % 2]);
    }
    fn store_bf16(self, x: [f32; LANES], to: &mut [u8; 2 * LANES]) {
        *to = from_fn(|i| bf16::from_f32(x[i / 2]).to_le_bytes()[i % 2]);
    }
    fn store_i8(self, x: [f32; LANES], to: &mut [u8; LANES]) {
        *to = x.map(|x| x as i8 as u8);
    }

    fn load_bytes(self, from: &Quads) -> Quads {
        *from
    }
    fn store_bytes(self, x: Quads, to: &mut Quads) {
        *to = x;
    }
    fn field(self, x: Quads, right: u32, mask: u8) -> Quads {
        x.map(|x| x >> right & mask)
    }
    fn field_left(self, x: Quads, left: u32, mask: u8) -> Quads {
        x.map(|x| x << left & mask)
    }
    fn or(self, a: Quads, b: Quads) -> Quads {
        from_fn(|i| a[i] | b[i])
    }
    fn lookup(self, table: &[u8; 16], x: Quads) -> Quads {
        x.map(|x| table[x as usize])
    }

    fn lookup_nibble<const PLACE: u32>(self, table: [f32; LANES], x: Quads) -> [f32; LANES] {
        from_fn(|lane| table[usize::from(x[4 * lane + PLACE as usize / 2] >> (4 * (PLACE % 2)) & 15)])
    }
    fn byte_of_lane<const INDEX: u32>(self, x: Quads) -> [i32; LANES] {
        from_fn(|lane| i32::from(x[4 * lane + INDEX as usize]))
    }
    fn splat_int(self, x: i32) -> [i32; LANES] {
        [x; LANES]
    }
    fn add_ints(self, a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        from_fn(|lane| a[lane] + b[lane])
    }

    fn start_sums(self, start: [i32; LANES]) -> [i32; LANES] {
        start
    }
    fn dot_bytes(self, sums: [i32; LANES], w: Quads, x: [u8; 4]) -> [i32; LANES] {
        from_fn(|lane| (0..4).fold(sums[lane], |sum, i| sum + i32::from(w[4 * lane + i]) * i32::from(x[i] as i8)))
    }
    fn total(self, sums: [i32; LANES], _start: [i32; LANES]) -> [i32; LANES] {
        sums
    }
}
