//! AVX2 with FMA and F16C: what every x86-64 server and desktop processor since 2013 has.

use std::arch::x86_64::*;

use super::{E4M3_EXPONENT, E4M3_LOWER, E4M3_SMALL, Kernel, LANES, Quads, Simd};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, if the processor has them.
    pub fn detect() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    /// Runs a kernel compiled for these instructions.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enter<K: Kernel>(avx2: Avx2, kernel: K) -> K::Output {
            kernel.run(avx2)
        }
        // SAFETY: `self` proves that the processor has the features.
        unsafe { enter(self, kernel) }
    }
}

/// Both halves of a 16-lane value, one after the other.
macro_rules! both {
    ($half:ident => $value:expr) => {{
        // SAFETY: `Avx2` proves that the processor has the instructions. Loads and stores go through references to arrays,
        // whose halves are in bounds.
        unsafe { [{ let $half = 0; $value }, { let $half = 1; $value }] }
    }};
}

impl Simd for Avx2 {
    type Floats = [__m256; 2];
    type Ints = [__m256i; 2];
    type Bytes = [__m256i; 2];
    type Sums = [__m256i; 2];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        self.run(kernel)
    }
    #[inline(always)]
    fn sums_hold(largest: u8) -> usize {
        // `vpmaddubsw` adds two products into 16 bits, and an activation is at most 127.
        i16::MAX as usize / (2 * 127 * usize::from(largest).max(1))
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // SAFETY: a hint that never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }

    #[inline(always)]
    fn prefetch_after(self, line: &Quads, bytes: usize) {
        // SAFETY: a hint that never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(line).cast::<i8>().wrapping_add(bytes)) };
    }

    #[inline(always)]
    fn prefetch_early(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // SAFETY: a hint that never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        both!(_half => _mm256_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [__m256; 2] {
        both!(half => _mm256_loadu_ps(from.as_ptr().add(8 * half)))
    }
    #[inline(always)]
    fn store(self, x: [__m256; 2], to: &mut [f32; LANES]) {
        both!(half => _mm256_storeu_ps(to.as_mut_ptr().add(8 * half), x[half]));
    }
    #[inline(always)]
    fn load_f16(self, from: &[u8; 2 * LANES]) -> [__m256; 2] {
        both!(half => _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(16 * half).cast())))
    }
    #[inline(always)]
    fn load_bf16(self, from: &[u8; 2 * LANES]) -> [__m256; 2] {
        both!(half => {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(16 * half).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn load_e4m3_div_256(self, from: &[u8; LANES]) -> [__m256; 2] {
        both!(half => {
            // Read as half precision, whose exponent's bias is larger by 8 and which has a bit more of it: that one, below the
            // sign, holds a copy of the sign.
            let wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.as_ptr().add(8 * half).cast()));
            _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16::<7>(wide), _mm_set1_epi16(!0x4000)))
        })
    }
    #[inline(always)]
    fn load_u8(self, from: &[u8; LANES]) -> [__m256; 2] {
        both!(half => {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(8 * half).cast())))
        })
    }
    #[inline(always)]
    fn load_i8(self, from: &[u8; LANES]) -> [__m256; 2] {
        both!(half => {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().add(8 * half).cast())))
        })
    }
    #[inline(always)]
    fn load_e8m0(self, from: &[u8; LANES]) -> [__m256; 2] {
        both!(half => {
            let code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(8 * half).cast()));
            // Code 0 is 2^-127, a subnormal.
            let bits = _mm256_max_epi32(_mm256_slli_epi32::<23>(code), _mm256_set1_epi32(1 << 22));
            _mm256_castsi256_ps(bits)
        })
    }

    #[inline(always)]
    fn upper_bf16(self, x: [__m256i; 2]) -> [__m256; 2] {
        both!(half => _mm256_castsi256_ps(_mm256_and_si256(x[half], _mm256_set1_epi32(0xFFFF_0000_u32 as i32))))
    }
    #[inline(always)]
    fn lower_bf16(self, x: [__m256i; 2]) -> [__m256; 2] {
        both!(half => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x[half])))
    }
    #[inline(always)]
    fn pairs_of_e4m3(self, codes: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        let [first, second] = both!(half => {
            let codes = codes[half];
            let magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7F));
            let small = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), magnitude);
            let lower = _mm256_blendv_epi8(
                _mm256_shuffle_epi8(sixteen(&E4M3_LOWER), magnitude),
                _mm256_shuffle_epi8(sixteen(&E4M3_SMALL[0]), magnitude),
                small,
            );
            let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(magnitude), _mm256_set1_epi8(0x07));
            let upper = _mm256_or_si256(upper, _mm256_set1_epi8(E4M3_EXPONENT));
            let upper = _mm256_blendv_epi8(upper, _mm256_shuffle_epi8(sixteen(&E4M3_SMALL[1]), magnitude), small);
            let upper = _mm256_or_si256(upper, _mm256_and_si256(codes, _mm256_set1_epi8(i8::MIN)));
            [_mm256_unpacklo_epi8(lower, upper), _mm256_unpackhi_epi8(lower, upper)]
        });
        [[first[0], second[0]], [first[1], second[1]]]
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_add_ps(a[half], b[half]))
    }
    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_mul_ps(a[half], b[half]))
    }
    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_div_ps(a[half], b[half]))
    }
    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_fmadd_ps(a[half], b[half], c[half]))
    }
    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_max_ps(a[half], b[half]))
    }
    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_min_ps(a[half], b[half]))
    }
    #[inline(always)]
    fn transpose(self, from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        // Quarter by quarter of 8 by 8.
        for row in [0, 8] {
            for column in [0, 8] {
                // SAFETY: `Avx2` proves that the processor has the instructions; each row has 8 lanes from `column` on, and
                // each column from `row` on.
                unsafe {
                    let mut x = [_mm256_setzero_ps(); 8];
                    for i in 0..8 {
                        x[i] = _mm256_loadu_ps(from[row + i].as_ptr().add(column));
                    }
                    let x = transpose_8(x);
                    for i in 0..8 {
                        _mm256_storeu_ps(to[column + i].as_mut_ptr().add(row), x[i]);
                    }
                }
            }
        }
    }
    #[inline(always)]
    fn to_floats(self, x: [__m256i; 2]) -> [__m256; 2] {
        both!(half => _mm256_cvtepi32_ps(x[half]))
    }
    #[inline(always)]
    fn exp2_whole(self, n: [__m256; 2]) -> [__m256; 2] {
        both!(half => {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n[half]), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        })
    }
    #[inline(always)]
    fn round(self, x: [__m256; 2]) -> [__m256; 2] {
        both!(half => _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x[half]))
    }
    #[inline(always)]
    fn sum(self, x: [__m256; 2]) -> f32 {
        // SAFETY: `Avx2` proves that the processor has the instructions.
        unsafe {
            let eight = _mm256_add_ps(x[0], x[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn largest(self, x: [__m256; 2]) -> f32 {
        // SAFETY: as in `sum`.
        unsafe {
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn store_f16(self, x: [__m256; 2], to: &mut [u8; 2 * LANES]) {
        both!(half => {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[half]);
            _mm_storeu_si128(to.as_mut_ptr().add(16 * half).cast(), halves)
        });
    }
    #[inline(always)]
    fn store_bf16(self, x: [__m256; 2], to: &mut [u8; 2 * LANES]) {
        let top = both!(half => {
            // To nearest, ties to even: half of the last place that stays, less one where that place is even.
            let bits = _mm256_castps_si256(x[half]);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x[half], x[half]));
            let kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0_0000), nan);
            _mm256_srli_epi32::<16>(kept)
        });
        // SAFETY: as in `sum`; the store covers the array.
        unsafe {
            // The pack interleaves 128-bit halves; the permutation puts its four quarters in order.
            let shorts = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(top[0], top[1]));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), shorts);
        }
    }
    #[inline(always)]
    fn store_i8(self, x: [__m256; 2], to: &mut [u8; LANES]) {
        // SAFETY: as in `sum`; the store covers the array.
        unsafe {
            let ints = [_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1])];
            // The pack interleaves 128-bit halves; the permutation puts its four quarters in order.
            let shorts = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(ints[0], ints[1]));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256::<1>(shorts));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn load_bytes(self, from: &Quads) -> [__m256i; 2] {
        both!(half => _mm256_loadu_si256(from.as_ptr().add(32 * half).cast()))
    }
    #[inline(always)]
    fn store_bytes(self, x: [__m256i; 2], to: &mut Quads) {
        both!(half => _mm256_storeu_si256(to.as_mut_ptr().add(32 * half).cast(), x[half]));
    }
    #[inline(always)]
    fn field(self, x: [__m256i; 2], right: u32, mask: u8) -> [__m256i; 2] {
        let count = right as i32;
        both!(half => {
            let shifted = _mm256_srl_epi16(x[half], _mm_cvtsi32_si128(count));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn field_left(self, x: [__m256i; 2], left: u32, mask: u8) -> [__m256i; 2] {
        let count = left as i32;
        both!(half => {
            let shifted = _mm256_sll_epi16(x[half], _mm_cvtsi32_si128(count));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(half => _mm256_or_si256(a[half], b[half]))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: [__m256i; 2]) -> [__m256i; 2] {
        both!(half => _mm256_shuffle_epi8(sixteen(table), x[half]))
    }

    #[inline(always)]
    fn byte_of_lane<const INDEX: u32>(self, x: [__m256i; 2]) -> [__m256i; 2] {
        both!(half => {
            let shifted = _mm256_srl_epi32(x[half], _mm_cvtsi32_si128(8 * INDEX as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi32(0xFF))
        })
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> [__m256i; 2] {
        both!(_half => _mm256_set1_epi32(x))
    }
    #[inline(always)]
    fn add_ints(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(half => _mm256_add_epi32(a[half], b[half]))
    }

    #[inline(always)]
    fn start_sums(self, _start: [__m256i; 2]) -> [__m256i; 2] {
        both!(_half => _mm256_setzero_si256())
    }
    #[inline(always)]
    fn dot_bytes(self, sums: [__m256i; 2], w: [__m256i; 2], x: [u8; 4]) -> [__m256i; 2] {
        both!(half => {
            let x = _mm256_set1_epi32(i32::from_le_bytes(x));
            _mm256_add_epi16(sums[half], _mm256_maddubs_epi16(w[half], x))
        })
    }
    #[inline(always)]
    fn total(self, sums: [__m256i; 2], start: [__m256i; 2]) -> [__m256i; 2] {
        both!(half => _mm256_add_epi32(start[half], _mm256_madd_epi16(sums[half], _mm256_set1_epi16(1))))
    }
    #[inline(always)]
    fn dot_centered_bytes(self, sums: [__m256i; 2], w: [__m256i; 2], x: [u8; 4]) -> [__m256i; 2] {
        both!(half => {
            // The sign goes to the activations, whose magnitude is at most 127: two products fit into 16 bits.
            let w = _mm256_xor_si256(w[half], _mm256_set1_epi8(i8::MIN));
            let x = _mm256_sign_epi8(_mm256_set1_epi32(i32::from_le_bytes(x)), w);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), x);
            _mm256_add_epi32(sums[half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }
}

/// Transposes 8 rows of 8.
///
/// # Safety
/// The processor has AVX.
#[inline(always)]
unsafe fn transpose_8(x: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: by the caller's promise.
    unsafe {
        // Pairs of rows, then fours, then halves: after each stage twice as many neighbours come from one column.
        let mut pairs = x;
        for i in [0, 2, 4, 6] {
            pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
        }
        let mut fours = pairs;
        for i in [0, 4] {
            fours[i] = _mm256_shuffle_ps::<0b01_00_01_00>(pairs[i], pairs[i + 2]);
            fours[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(pairs[i], pairs[i + 2]);
            fours[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(pairs[i + 1], pairs[i + 3]);
            fours[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(pairs[i + 1], pairs[i + 3]);
        }
        let mut columns = fours;
        for i in 0..4 {
            columns[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
            columns[i + 4] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
        }
        columns
    }
}

/// A table in both halves of a register.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn sixteen(table: &[u8; 16]) -> __m256i {
    // SAFETY: by the caller's promise; the load is of the array.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
}
