//! The values of small floating point codes, as tables made at compile time.

/// Values of the OCP formats "FP8 E4M3" (the "fn" variant), indexed by code. There are no infinities; 0x7F and 0xFF are NaN.
pub const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = minifloat(code as u32, 4, 3);
        code += 1;
    }
    table[0x7F] = f32::NAN;
    table[0xFF] = f32::NAN;
    table
};

/// Values of the OCP format "FP4 E2M1", indexed by code. All are finite.
pub const E2M1: [f32; 16] = {
    let mut table = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = minifloat(code as u32, 2, 1);
        code += 1;
    }
    table
};

/// A code of one sign bit, `exponent_bits` with the usual bias, and `mantissa_bits`, read as if every code were a number.
const fn minifloat(code: u32, exponent_bits: u32, mantissa_bits: u32) -> f32 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = code >> (exponent_bits + mantissa_bits);
    let exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = code & ((1 << mantissa_bits) - 1);
    // A subnormal code has the exponent of the smallest normal one and no leading bit.
    let (units, exponent) = if exponent == 0 { (mantissa, 1) } else { (mantissa | 1 << mantissa_bits, exponent) };
    let magnitude = units as f32 * f32::from_bits((127 + exponent - bias - mantissa_bits) << 23);
    if sign == 1 { -magnitude } else { magnitude }
}

/// The OCP scale "E8M0": `2^(code - 127)`; 0xFF is NaN.
pub const fn e8m0(code: u8) -> f32 {
    match code {
        0xFF => f32::NAN,
        // 2^-127 is a subnormal f32.
        0 => f32::from_bits(1 << 22),
        code => f32::from_bits((code as u32) << 23),
    }
}
