//! Functions of 16 lanes.

use crate::isa::Simd;

/// `e^x`, within two units in the last place; below the smallest normal number it stays there, and above the largest
/// finite result it stays there. NaN stays NaN.
#[inline(always)]
pub fn exp<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    // e^x = 2^n · e^r with |r| <= ln(2) / 2; ln(2) in two parts, so that n · ln(2) is exact enough (Cody and Waite 1980).
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = simd.min(simd.splat(88.37), simd.max(simd.splat(-87.33), x));
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let r = simd.fma(n, simd.splat(-LN_2_HIGH), x);
    let r = simd.fma(n, simd.splat(-LN_2_LOW), r);
    // The Taylor series: its next term is below 2^-26.
    let mut sum = simd.splat(1.0 / 5040.0);
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = simd.fma(sum, r, simd.splat(coefficient));
    }
    simd.mul(sum, simd.exp2_whole(n))
}

/// `2^x` for `x` up to 127, within two units in the last place; 0 below -126.5. NaN stays NaN.
#[inline(always)]
pub fn exp2<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    let x = simd.max(simd.splat(-127.0), x);
    let n = simd.round(x);
    let r = simd.add(x, simd.mul(n, simd.splat(-1.0)));
    // Coefficients of the least relative error for |r| <= 1/2, which is below 2^-26 (Remez).
    let mut sum = simd.splat(1.534_581_2e-4);
    for coefficient in [1.339_993_1e-3, 9.618_489e-3, 5.550_328_6e-2, 0.240_226_46, std::f32::consts::LN_2, 1.0] {
        sum = simd.fma(sum, r, simd.splat(coefficient));
    }
    simd.mul(sum, simd.exp2_whole(n))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    let one = simd.splat(1.0);
    simd.div(one, simd.add(one, exp(simd, simd.mul(x, simd.splat(-1.0)))))
}

/// `cap · tanh(x / cap)`.
#[inline(always)]
pub fn capped<S: Simd>(simd: S, x: S::Floats, cap: f32) -> S::Floats {
    // tanh(y) is 2 · sigmoid(2y) - 1.
    let share = sigmoid(simd, simd.mul(x, simd.splat(2.0 / cap)));
    simd.fma(share, simd.splat(2.0 * cap), simd.splat(-cap))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{Isa, Kernel, LANES};

    struct Exp2([f32; LANES]);

    impl Kernel for Exp2 {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            simd.store(exp2(simd, simd.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn exp2_is_that_of_the_library() {
        for isa in Isa::available() {
            for i in -126_499..127_000 {
                let x = i as f32 * 1e-3;
                let (got, want) = (isa.run(Exp2([x; LANES]))[5], f64::from(x).exp2());
                assert!((f64::from(got) / want - 1.0).abs() < 3e-7, "{isa} 2^{x}: {got:e} is not {want:e}");
            }
            assert!(isa.run(Exp2([f32::NAN; LANES]))[0].is_nan());
            assert_eq!(isa.run(Exp2([-127.0; LANES]))[0], 0.0);
            assert_eq!(isa.run(Exp2([f32::NEG_INFINITY; LANES]))[0], 0.0);
            assert_eq!(isa.run(Exp2([0.0; LANES]))[0], 1.0);
        }
    }

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            simd.store(exp(simd, simd.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn exp_is_that_of_the_library() {
        for isa in Isa::available() {
            for i in -87_300..88_300 {
                let x = i as f32 * 1e-3;
                let (got, want) = (isa.run(Exp([x; LANES]))[5], f64::from(x).exp());
                assert!((f64::from(got) / want - 1.0).abs() < 3e-7, "{isa} e^{x}: {got:e} is not {want:e}");
            }
            assert!(isa.run(Exp([f32::NAN; LANES]))[0].is_nan());
            assert!(isa.run(Exp([f32::NEG_INFINITY; LANES]))[0] < 1.3e-38);
            assert_eq!(isa.run(Exp([0.0; LANES]))[0], 1.0);
        }
    }
}
