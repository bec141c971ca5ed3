//! Weights and activations that tests and benches make up.

#![allow(dead_code, missing_docs)]

use consort_compute::portable::HostBuffer;
use consort_compute::{Format, Matrix, ScaleFormat};

/// Every format, with a few of the affine family.
pub const FORMATS: &[Format] = &[
    Format::F32,
    Format::F16,
    Format::BF16,
    Format::F8E4M3,
    Format::F8E4M3Block128,
    Format::MxFp8,
    Format::MxFp4,
    Format::NvFp4,
    Format::Affine { bits: 2, group: 64, scale: ScaleFormat::F16 },
    Format::Affine { bits: 3, group: 64, scale: ScaleFormat::BF16 },
    Format::Affine { bits: 4, group: 32, scale: ScaleFormat::F16 },
    Format::Affine { bits: 4, group: 64, scale: ScaleFormat::BF16 },
    Format::Affine { bits: 4, group: 128, scale: ScaleFormat::F32 },
    Format::Affine { bits: 5, group: 32, scale: ScaleFormat::BF16 },
    Format::Affine { bits: 6, group: 64, scale: ScaleFormat::F32 },
    Format::Affine { bits: 8, group: 128, scale: ScaleFormat::BF16 },
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2K,
    Format::Q3K,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::IQ4NL,
    Format::IQ4XS,
];

/// SplitMix64 (Steele, Lea and Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// From -1 to 1.
    pub fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// A matrix of random codes with scales of ordinary size.
pub fn matrix(random: &mut Random, format: Format, rows: usize, cols: usize) -> Matrix<'static> {
    let mut data: Vec<u8> = (0..rows * format.row_bytes(cols)).map(|_| random.next() as u8).collect();
    for block in data.chunks_exact_mut(format.block_bytes()) {
        set_scales(random, format, block);
    }
    Matrix::new(format, rows, cols, data)
}

/// Replaces a block's floating point fields with ordinary numbers.
fn set_scales(random: &mut Random, format: Format, block: &mut [u8]) {
    let mut put = |at: usize, scale: ScaleFormat, size: f32| {
        let x = random.value() * size;
        match scale {
            ScaleFormat::F16 => block[at..at + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes()),
            ScaleFormat::BF16 => block[at..at + 2].copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
            ScaleFormat::F32 => block[at..at + 4].copy_from_slice(&x.to_le_bytes()),
        }
    };
    use ScaleFormat::{BF16, F16, F32};
    match format {
        Format::F32 => put(0, F32, 1.0),
        Format::F16 => put(0, F16, 1.0),
        Format::BF16 => put(0, BF16, 1.0),
        Format::F8E4M3Block128 => put(0, F32, 0.01),
        Format::Affine { scale, .. } => {
            put(0, scale, 0.1);
            put(scale.bytes(), scale, 1.0);
        }
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::IQ4NL | Format::IQ4XS => put(0, F16, 0.1),
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => {
            put(0, F16, 0.1);
            put(2, F16, 1.0);
        }
        Format::Q2K => {
            put(80, F16, 0.1);
            put(82, F16, 0.1);
        }
        Format::Q3K => put(108, F16, 0.1),
        Format::Q6K => put(208, F16, 0.1),
        Format::MxFp8 | Format::MxFp4 => block[0] = 118 + block[0] % 12,
        // A positive scale that is not NaN.
        Format::NvFp4 => block[0] %= 0x70,
        Format::F8E4M3 => {}
    }
    // 0x7F and 0xFF are NaN.
    let codes = match format {
        Format::F8E4M3 => 0,
        Format::MxFp8 => 1,
        Format::F8E4M3Block128 => 4,
        _ => block.len(),
    };
    block[codes..].iter_mut().filter(|code| **code & 0x7F == 0x7F).for_each(|code| *code = 0x30);
}

/// Activations, some of them large.
pub fn activations(random: &mut Random, rows: usize, cols: usize) -> HostBuffer {
    let mut value = || {
        let outlier = random.below(50) == 0;
        random.value() * if outlier { 30.0 } else { 1.0 }
    };
    let values: Vec<f32> = (0..rows * cols).map(|_| value()).collect();
    HostBuffer::from_values(rows, cols, &values)
}
