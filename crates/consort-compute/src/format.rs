//! Number formats: how the values of a weight are stored.
//!
//! Every format here is a *row-block encoding*: a row of a matrix is a sequence of blocks, and a block holds all that is
//! needed to decode it (its scales sit beside its values). Checkpoints that keep scales in tensors of their own are brought
//! into this form while they load, without changing a value. A factor that belongs to a whole row or tensor (the global
//! scale of NVFP4, the scalar scale of FP8) is kept apart, as [`Matrix::row_scale`](crate::Matrix::row_scale).

use std::fmt;

/// How the scale and bias of an affine group are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// IEEE half precision, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    BF16,
    /// IEEE single precision, 4 bytes.
    F32,
}

impl ScaleFormat {
    /// Bytes of one scale.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A row-block encoding of f32 values.
///
/// The layouts named `Q*` and `IQ*` are those of the GGUF specification (ggml `block_*` structures), little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// FP8 E4M3 (OCP "fn" variant: no infinities, 0x7F and 0xFF are NaN), scaled by the row scale only.
    F8E4M3,
    /// 128 FP8 E4M3 values behind one f32 scale that multiplies them.
    F8E4M3Block128,
    /// 32 FP8 E4M3 values behind one E8M0 scale (OCP MXFP8).
    MxFp8,
    /// 32 E2M1 values behind one E8M0 scale (OCP MXFP4). Value `2i` is the low nibble of byte `i`.
    MxFp4,
    /// 16 E2M1 values behind one E4M3 scale (NVFP4). Value `2i` is the low nibble of byte `i`.
    NvFp4,
    /// A group of `group` unsigned integers of `bits` bits, little-endian bit order, behind a scale and a bias:
    /// `value = scale * q + bias` (MLX affine; GPTQ and AWQ read as the same).
    Affine {
        /// Bits of one value: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Values of one group: 32, 64 or 128.
        group: u16,
        /// How the scale and the bias are stored, in this order.
        scale: ScaleFormat,
    },
    /// GGUF Q4_0.
    Q4_0,
    /// GGUF Q4_1.
    Q4_1,
    /// GGUF Q5_0.
    Q5_0,
    /// GGUF Q5_1.
    Q5_1,
    /// GGUF Q8_0.
    Q8_0,
    /// GGUF Q2_K.
    Q2K,
    /// GGUF Q3_K.
    Q3K,
    /// GGUF Q4_K.
    Q4K,
    /// GGUF Q5_K.
    Q5K,
    /// GGUF Q6_K.
    Q6K,
    /// GGUF IQ4_NL.
    IQ4NL,
    /// GGUF IQ4_XS.
    IQ4XS,
}

impl Format {
    /// Values of one block.
    pub const fn block_values(self) -> usize {
        self.layout().0
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.layout().1
    }

    /// `(values, bytes)` of one block: the table that every size in the system comes from.
    const fn layout(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::F8E4M3 => (1, 1),
            Self::F8E4M3Block128 => (128, 4 + 128),
            Self::MxFp8 => (32, 1 + 32),
            Self::MxFp4 => (32, 1 + 16),
            Self::NvFp4 => (16, 1 + 8),
            Self::Affine { bits, group, scale } => {
                (group as usize, 2 * scale.bytes() + (group as usize * bits as usize) / 8)
            }
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 2 + 2 + 16),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 2 + 2 + 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q2K => (256, 16 + 64 + 2 + 2),
            Self::Q3K => (256, 32 + 64 + 12 + 2),
            Self::Q4K => (256, 2 + 2 + 12 + 128),
            Self::Q5K => (256, 2 + 2 + 12 + 32 + 128),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
            Self::IQ4NL => (32, 2 + 16),
            Self::IQ4XS => (256, 2 + 2 + 4 + 128),
        }
    }

    /// Bytes of a row of `cols` values; a last block that is only partly used counts whole.
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(self.block_values()) * self.block_bytes()
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F8E4M3 => f.write_str("FP8_E4M3"),
            Self::F8E4M3Block128 => f.write_str("FP8_E4M3_128"),
            Self::MxFp8 => f.write_str("MXFP8"),
            Self::MxFp4 => f.write_str("MXFP4"),
            Self::NvFp4 => f.write_str("NVFP4"),
            Self::Affine { bits, group, .. } => write!(f, "AFFINE{bits}_G{group}"),
            Self::Q2K => f.write_str("Q2_K"),
            Self::Q3K => f.write_str("Q3_K"),
            Self::Q4K => f.write_str("Q4_K"),
            Self::Q5K => f.write_str("Q5_K"),
            Self::Q6K => f.write_str("Q6_K"),
            Self::IQ4NL => f.write_str("IQ4_NL"),
            Self::IQ4XS => f.write_str("IQ4_XS"),
            plain => write!(f, "{plain:?}"),
        }
    }
}
