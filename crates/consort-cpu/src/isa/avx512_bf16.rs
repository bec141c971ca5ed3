//! AVX-512 with products of bfloat16 pairs and permutations of bytes: Zen 4, Sapphire Rapids and later. Only products with
//! activations in bfloat16 have a form of their own for it; everything else runs as with [`Avx512`].

use std::arch::x86_64::*;

use super::{Avx512, Quads};

/// Proof that the processor has AVX-512 BF16 and VBMI besides what [`Avx512`] proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512Bf16 {
    vectors: Avx512,
}

/// A computation with bfloat16 pairs.
pub trait PairKernel {
    /// Does it; [`Kernel::run`](super::Kernel::run) says how implementations are marked.
    fn run(self, dot: Avx512Bf16);
}

/// The magnitudes of FP8 E4M3 divided by 256, in bfloat16: their lower and their upper bytes.
static MAGNITUDES: [[u8; 128]; 2] = {
    let mut table = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        // Steps of 2^-9 below the first normal number; above, eight to a power of two.
        let (exponent, fraction) = (code / 8, code % 8);
        let steps = if exponent == 0 { fraction } else { (8 + fraction) << (exponent - 1) };
        let bits = (steps as f32 / 131_072.0).to_bits();
        (table[0][code], table[1][code]) = ((bits >> 16) as u8, (bits >> 24) as u8);
        code += 1;
    }
    table
};

impl Avx512Bf16 {
    /// The proof, if the processor has them.
    pub fn detect() -> Option<Self> {
        let vectors = Avx512::detect()?;
        let has = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi");
        has.then_some(Self { vectors })
    }

    /// The vector instructions that come with them.
    #[inline(always)]
    pub fn vectors(self) -> Avx512 {
        self.vectors
    }

    /// Runs a kernel compiled for these instructions.
    pub fn run(self, kernel: impl PairKernel) {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx512vbmi,fma,f16c")]
        fn enter(dot: Avx512Bf16, kernel: impl PairKernel) {
            kernel.run(dot);
        }
        // SAFETY: `self` proves that the processor has the features.
        unsafe { enter(self, kernel) }
    }

    /// `(sums + upper half of w · upper half of x) + lower half of w · lower half of x` in each lane, each sum rounded to
    /// nearest; numbers below 2^-126 count as zero.
    #[inline(always)]
    pub fn add_products(self, sums: __m512, w: __m512i, x: u32) -> __m512 {
        // SAFETY: `self` proves that the processor has the instructions; vectors of the same bits are transmuted.
        unsafe {
            let (w, x) = (std::mem::transmute::<__m512i, __m512bh>(w), _mm512_set1_epi32(x as i32));
            _mm512_dpbf16_ps(sums, w, std::mem::transmute::<__m512i, __m512bh>(x))
        }
    }

    /// What [`Simd::pairs_of_e4m3`](super::Simd::pairs_of_e4m3) gives, from a table.
    #[inline(always)]
    pub fn pairs_of_e4m3(self, codes: &Quads) -> [__m512i; 2] {
        // SAFETY: `self` proves that the processor has the instructions; loads are of 64 bytes of arrays that have them.
        unsafe {
            let codes = _mm512_loadu_si512(codes.as_ptr().cast());
            let table = |byte: usize, half: usize| {
                let quarters: &[[u8; 64]] = MAGNITUDES[byte].as_chunks().0;
                quarters[half].as_ptr().cast()
            };
            let (first, second) = (_mm512_loadu_si512(table(0, 0)), _mm512_loadu_si512(table(0, 1)));
            let lower = _mm512_permutex2var_epi8(first, codes, second);
            let (first, second) = (_mm512_loadu_si512(table(1, 0)), _mm512_loadu_si512(table(1, 1)));
            let upper = _mm512_permutex2var_epi8(first, codes, second);
            // a | (b & c)
            let upper = _mm512_ternarylogic_epi32::<0b1111_1000>(upper, codes, _mm512_set1_epi8(i8::MIN));
            [_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)]
        }
    }
}
