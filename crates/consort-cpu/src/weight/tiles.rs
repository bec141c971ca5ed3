//! From tiles of memory to the tiles of a processor: rows of 64 bytes that hold four bytes or two bfloat16 numbers of each lane.
//!
//! Bytes lie in quads of four consecutive columns. Bfloat16 numbers lie in pairs: of each four columns first 0 and 2, then 1
//! and 3, because that is how 16-bit operations take a quad apart. Activations follow the same order.

use std::arch::x86_64::*;

use super::layout::{Codes, Integers, Layout, STEP};
use super::unpack::{CHUNK, IntegerChunk, piece};
use crate::isa::{Avx512, LANES, Quads, Simd};

/// Vectors of a step's quads and pairs.
const QUADS: usize = STEP / 4;
const PAIRS: usize = STEP / 2;

/// A chunk of a panel as bfloat16 pairs.
#[repr(C, align(64))]
pub struct TileChunk(pub [Quads; CHUNK / 2]);

/// The values of a chunk in bfloat16.
impl TileChunk {
    /// An empty chunk.
    pub const ZERO: Self = Self([[0; 4 * LANES]; CHUNK / 2]);

    /// Parts that the values of a layout without scales are the sum of: bfloat16 has 8 significant bits, half precision 11, and
    /// f32 24.
    pub fn parts(layout: &Layout) -> usize {
        match layout.codes {
            Codes::F32 => 3,
            Codes::F16 => 2,
            Codes::BF16 | Codes::E4M3 | Codes::Integers(_) => 1,
        }
    }

    /// Unpacks part `part` of values without scales, the largest first, and asks for the memory of `ahead` meanwhile.
    #[inline(always)]
    pub fn unpack_part(&mut self, simd: Avx512, layout: &Layout, part: usize, tiles: &[u8], ahead: &[u8]) {
        let (out, _) = self.0.as_chunks_mut::<2>();
        match layout.codes {
            Codes::F32 => {
                for (i, (out, columns)) in out.iter_mut().zip(tiles.as_chunks::<256>().0).enumerate() {
                    simd.prefetch(piece(ahead, i, CHUNK / 4));
                    let (columns, _) = columns.as_chunks();
                    let [a, b, c, d] =
                        [load_f32(&columns[0]), load_f32(&columns[1]), load_f32(&columns[2]), load_f32(&columns[3])];
                    put(simd, out, [rest(a, part), rest(b, part), rest(c, part), rest(d, part)]);
                }
            }
            Codes::F16 => {
                for (i, (out, columns)) in out.iter_mut().zip(tiles.as_chunks::<128>().0).enumerate() {
                    simd.prefetch(piece(ahead, i, CHUNK / 4));
                    let (columns, _) = columns.as_chunks();
                    let [a, b, c, d] = [
                        simd.load_f16(&columns[0]),
                        simd.load_f16(&columns[1]),
                        simd.load_f16(&columns[2]),
                        simd.load_f16(&columns[3]),
                    ];
                    put(simd, out, [rest(a, part), rest(b, part), rest(c, part), rest(d, part)]);
                }
            }
            Codes::BF16 => {
                for (i, (out, columns)) in out.iter_mut().zip(tiles.as_chunks::<128>().0).enumerate() {
                    simd.prefetch(piece(ahead, i, CHUNK / 4));
                    let (pairs, _) = columns.as_chunks();
                    put_pairs(simd, out, [simd.load_bytes(&pairs[0]), simd.load_bytes(&pairs[1])]);
                }
            }
            Codes::E4M3 => self.e4m3(simd, layout, tiles, ahead),
            Codes::Integers(_) => unreachable!("integers are scaled"),
        }
    }

    /// Unpacks the unscaled values of a layout with scales, which are exact in bfloat16, and its scales into `integers`.
    #[inline(always)]
    pub fn unpack_codes(
        &mut self,
        simd: Avx512,
        layout: &Layout,
        integers: &mut IntegerChunk,
        tiles: &[u8],
        ahead: &[u8],
    ) {
        let steps = match &layout.codes {
            Codes::Integers(codes) if codes.largest >= 64 => {
                let steps = integers.unpack_bytes(simd, layout, codes, tiles, ahead);
                self.bytes(simd, codes, &integers.codes[..steps * QUADS]);
                steps
            }
            Codes::Integers(codes) => {
                integers.unpack(simd, layout, codes, tiles, ahead);
                let steps = steps_of(layout, tiles);
                self.small_codes(simd, codes, &integers.codes[..steps * QUADS]);
                steps
            }
            _ => {
                integers.unpack_scales(simd, layout, tiles);
                self.e4m3(simd, layout, tiles, ahead);
                steps_of(layout, tiles)
            }
        };
        // Products go two steps at a time.
        if steps % 2 == 1 {
            self.0[steps * PAIRS..][..PAIRS].fill([0; 4 * LANES]);
            integers.clear_scales(layout, steps);
        }
    }

    /// Codes of at most 6 bits.
    #[inline(always)]
    fn small_codes(&mut self, simd: Avx512, codes: &Integers, quads: &[Quads]) {
        let table = Bf16Table::new(codes.offset);
        for (out, quad) in self.0.as_chunks_mut::<2>().0.iter_mut().zip(quads) {
            let quad = simd.load_bytes(quad);
            let odd = odd_bytes(quad);
            if codes.largest < 32 {
                simd.store_bytes(table.lookup_32(quad), &mut out[0]);
                simd.store_bytes(table.lookup_32(odd), &mut out[1]);
            } else {
                simd.store_bytes(table.lookup_64(quad), &mut out[0]);
                simd.store_bytes(table.lookup_64(odd), &mut out[1]);
            }
        }
    }

    /// Bytes, signed unless the offset says that they aren't.
    #[inline(always)]
    fn bytes(&mut self, simd: Avx512, codes: &Integers, quads: &[Quads]) {
        for (out, quad) in self.0.as_chunks_mut::<2>().0.iter_mut().zip(quads) {
            let quad = simd.load_bytes(quad);
            let columns = if codes.unsigned_bytes() {
                [
                    simd.to_floats(simd.byte_of_lane::<0>(quad)),
                    simd.to_floats(simd.byte_of_lane::<1>(quad)),
                    simd.to_floats(simd.byte_of_lane::<2>(quad)),
                    simd.to_floats(simd.byte_of_lane::<3>(quad)),
                ]
            } else {
                [signed_byte::<24>(quad), signed_byte::<16>(quad), signed_byte::<8>(quad), signed_byte::<0>(quad)]
            };
            put(simd, out, columns);
        }
    }

    /// FP8 E4M3 divided by 256.
    #[inline(always)]
    fn e4m3(&mut self, simd: Avx512, layout: &Layout, tiles: &[u8], ahead: &[u8]) {
        let mut out = self.0.as_chunks_mut::<2>().0.iter_mut().enumerate();
        for tile in tiles.chunks_exact(layout.tile_bytes) {
            for (columns, (i, out)) in tile[layout.scale_bytes..].as_chunks().0.iter().zip(&mut out) {
                simd.prefetch(piece(ahead, i, CHUNK / 4));
                put_pairs(simd, out, simd.pairs_of_e4m3(simd.load_bytes(columns)));
            }
        }
    }
}

impl IntegerChunk {
    /// Unpacks tiles of integers to quads of `code - offset`: signed bytes, unless the layout has
    /// [unsigned ones](Integers::unsigned_bytes). Returns how many steps there are, after which, if they are odd, follows an
    /// empty one.
    #[inline(always)]
    pub fn unpack_bytes(
        &mut self,
        simd: Avx512,
        layout: &Layout,
        codes: &Integers,
        tiles: &[u8],
        ahead: &[u8],
    ) -> usize {
        let steps = steps_of(layout, tiles);
        self.unpack(simd, layout, codes, tiles, ahead);
        if codes.offset != 0 {
            for quad in &mut self.codes[..steps * QUADS] {
                simd.store_bytes(subtract(simd.load_bytes(quad), codes.offset), quad);
            }
        }
        if steps % 2 == 1 {
            self.codes[steps * QUADS..][..QUADS].fill([0; 4 * LANES]);
            self.clear_scales(layout, steps);
        }
        steps
    }

    /// Clears the scales of a step.
    #[inline(always)]
    fn clear_scales(&mut self, layout: &Layout, step: usize) {
        let groups = if layout.group < STEP { 2 * step..2 * step + 2 } else { step..step + 1 };
        self.factors.scales[groups.clone()].fill([0.0; LANES]);
        self.factors.biases[groups].fill([0.0; LANES]);
    }
}

/// Steps of tiles.
#[inline(always)]
fn steps_of(layout: &Layout, tiles: &[u8]) -> usize {
    tiles.len() / layout.tile_bytes * (layout.block / STEP)
}

/// Calls intrinsics.
macro_rules! call {
    ($value:expr) => {
        // SAFETY: the functions that use this are called with an `Avx512`: the processor has AVX-512 F and BW. Loads go through
        // references to arrays of their size.
        unsafe { $value }
    };
}

#[inline(always)]
fn load_f32(from: &[u8; 4 * LANES]) -> __m512 {
    call!(_mm512_loadu_ps(from.as_ptr().cast()))
}

/// What is left of values when their `parts` largest parts of 8 bits are gone. Each difference is exact.
#[inline(always)]
fn rest(x: __m512, parts: usize) -> __m512 {
    call!({
        let upper = _mm512_castsi512_ps(_mm512_set1_epi32(0xFFFF_0000_u32 as i32));
        let mut x = x;
        for _ in 0..parts {
            x = _mm512_sub_ps(x, _mm512_and_ps(x, upper));
        }
        x
    })
}

/// Four columns of f32, cut off to bfloat16, as two rows of pairs.
#[inline(always)]
fn put(simd: Avx512, out: &mut [Quads; 2], [a, b, c, d]: [__m512; 4]) {
    simd.store_bytes(pair(a, c), &mut out[0]);
    simd.store_bytes(pair(b, d), &mut out[1]);
}

/// The upper halves of both: `a`'s below `b`'s.
#[inline(always)]
fn pair(a: __m512, b: __m512) -> __m512i {
    call!({
        let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(a));
        _mm512_mask_blend_epi16(0xAAAA_AAAA, low, _mm512_castps_si512(b))
    })
}

/// Pairs of columns 0 and 1, and of 2 and 3, each with the first above the second, as the two rows of pairs of tiles.
#[inline(always)]
fn put_pairs(simd: Avx512, out: &mut [Quads; 2], [first, second]: [__m512i; 2]) {
    call!({
        let even = _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(first), second);
        let odd = _mm512_mask_blend_epi16(0xAAAA_AAAA, first, _mm512_slli_epi32::<16>(second));
        simd.store_bytes(even, &mut out[0]);
        simd.store_bytes(odd, &mut out[1]);
    });
}

/// Columns 1 and 3 of a quad in the lower bytes of 16-bit numbers.
#[inline(always)]
fn odd_bytes(quad: __m512i) -> __m512i {
    call!(_mm512_srli_epi16::<8>(quad))
}

#[inline(always)]
fn subtract(bytes: __m512i, offset: i16) -> __m512i {
    call!(_mm512_sub_epi8(bytes, _mm512_set1_epi8(offset as i8)))
}

/// A signed byte of each lane, which a shift by `LEFT` makes the highest.
#[inline(always)]
fn signed_byte<const LEFT: u32>(quad: __m512i) -> __m512 {
    call!(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<LEFT>(quad))))
}

/// The bfloat16 numbers that codes 0 to 63 stand for.
#[derive(Clone, Copy)]
struct Bf16Table([__m512i; 2]);

impl Bf16Table {
    #[inline(always)]
    fn new(offset: i16) -> Self {
        call!({
            let first = _mm512_sub_epi32(
                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                _mm512_set1_epi32(offset.into()),
            );
            let mut quarters = [_mm256_setzero_si256(); 4];
            for (i, quarter) in quarters.iter_mut().enumerate() {
                let values = _mm512_cvtepi32_ps(_mm512_add_epi32(first, _mm512_set1_epi32((LANES * i) as i32)));
                *quarter = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(values)));
            }
            let both = [_mm512_castsi256_si512(quarters[0]), _mm512_castsi256_si512(quarters[2])];
            Self([_mm512_inserti64x4::<1>(both[0], quarters[1]), _mm512_inserti64x4::<1>(both[1], quarters[3])])
        })
    }

    /// Of the lower five bits of 16-bit numbers.
    #[inline(always)]
    fn lookup_32(self, codes: __m512i) -> __m512i {
        call!(_mm512_permutexvar_epi16(codes, self.0[0]))
    }

    /// Of the lower six bits of 16-bit numbers.
    #[inline(always)]
    fn lookup_64(self, codes: __m512i) -> __m512i {
        call!(_mm512_permutex2var_epi16(self.0[0], codes, self.0[1]))
    }
}

/// 16 activations as the sum of three bfloat16 numbers, the largest first, in the order of pairs. Sixteen significant bits are
/// left when the first eight are gone, and eight when the second are: the parts are exact, down to 2^-126.
#[inline(always)]
pub fn split(x: __m512) -> [[u16; LANES]; 3] {
    static ORDER: [i16; 16] = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15];
    call!({
        let order = _mm256_loadu_si256(ORDER.as_ptr().cast());
        let mut out = [[0; LANES]; 3];
        for (part, out) in out.iter_mut().enumerate() {
            let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(rest(x, part))));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_permutexvar_epi16(order, halves));
        }
        out
    })
}
