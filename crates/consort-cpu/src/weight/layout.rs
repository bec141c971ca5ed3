//! What a tile holds, for each number format: the table that packing and unpacking follow.

use consort_compute::{Format, ScaleFormat, decode};

use crate::isa::LANES;

/// Values that integer codes are laid out by.
pub const STEP: usize = 32;

/// How a format's values lie in a tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    /// The values.
    pub codes: Codes,
    /// What they are multiplied by.
    pub scales: Scales,
    /// Values of a tile's row.
    pub block: usize,
    /// Values that share a scale: a divisor of `block`.
    pub group: usize,

    // What follows from the above and is asked for in every chunk.
    /// Scales of a tile's row.
    pub groups: usize,
    /// Steps that share a scale, at least 1.
    pub repeat: usize,
    /// Bytes of a tile's scales.
    pub scale_bytes: usize,
    /// Bytes of a tile: 16 rows of `block` values and their scales.
    pub tile_bytes: usize,
}

/// The values of a tile, before they are scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codes {
    /// f32.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    BF16,
    /// FP8 E4M3.
    E4M3,
    /// Small whole numbers, on which products with whole activations are exact.
    Integers(Integers),
}

/// Integer codes: `value = scale · (code - offset) + bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Integers {
    /// Bits of a stored code.
    pub bits: u8,
    /// What a stored 4-bit code stands for, if not for itself.
    pub table: Option<[u8; 16]>,
    /// The code of zero.
    pub offset: i16,
    /// The largest code.
    pub largest: u8,
}

impl Integers {
    /// Whether codes less their offset are unsigned bytes, because they are too large for signed ones.
    pub fn unsigned_bytes(&self) -> bool {
        i16::from(self.largest) - self.offset > i16::from(i8::MAX)
    }

    /// Bytes of 32 columns of 16 rows.
    pub const fn step_bytes(&self) -> usize {
        LANES * STEP / 8 * self.bits as usize
    }
}

/// The scales of a tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    /// None: the values are themselves.
    One,
    /// A number for each group, then, if `bias`, another one that is added; `factor` multiplies all scales.
    Plain {
        /// How they are stored.
        number: Number,
        /// Whether a bias follows.
        bias: bool,
        /// Units of the codes.
        factor: f32,
    },
    /// An f16 factor of the block, another one for minima if there are any, then a byte for each group, then, if
    /// `minimum`, another byte for each group that is subtracted.
    Nested {
        /// Whether the bytes are signed.
        signed: bool,
        /// Whether there are minima.
        minimum: bool,
    },
}

/// How a scale is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// f32.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    BF16,
    /// FP8 E4M3.
    E4M3,
    /// A power of two.
    E8M0,
}

impl Number {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::E4M3 | Self::E8M0 => 1,
        }
    }
}

impl From<ScaleFormat> for Number {
    fn from(format: ScaleFormat) -> Self {
        match format {
            ScaleFormat::F32 => Self::F32,
            ScaleFormat::F16 => Self::F16,
            ScaleFormat::BF16 => Self::BF16,
        }
    }
}

/// Twice the values of E2M1, which are whole, moved up by 12 to be positive.
const E2M1_CODES: [u8; 16] = {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (2.0 * decode::codes::E2M1[i] + 12.0) as u8;
        i += 1;
    }
    codes
};

/// The levels of IQ4, moved up by 128 to be positive.
const IQ4_CODES: [u8; 16] = {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (decode::IQ4_LEVELS[i] as i16 + 128) as u8;
        i += 1;
    }
    codes
};

impl Layout {
    fn new(codes: Codes, scales: Scales, block: usize, group: usize) -> Self {
        let groups = block / group;
        let scale_bytes = LANES * scales.sizes(groups).sum::<usize>();
        let tile_bytes = scale_bytes + LANES * block * codes.bits() / 8;
        Self { codes, scales, block, group, groups, repeat: group.div_ceil(STEP), scale_bytes, tile_bytes }
    }

    /// The layout of a format.
    pub fn of(format: Format) -> Self {
        let float = |codes| Self::new(codes, Scales::One, STEP, STEP);
        let integers = |codes, scales, block, group| Self::new(Codes::Integers(codes), scales, block, group);
        let unsigned = |bits: u8, offset| Integers { bits, table: None, offset, largest: u8::MAX >> (8 - bits) };
        let e2m1 = Integers { bits: 4, table: Some(E2M1_CODES), offset: 12, largest: 24 };
        let iq4 = Integers { bits: 4, table: Some(IQ4_CODES), offset: 128, largest: 241 };
        let plain = |number, bias| Scales::Plain { number, bias, factor: 1.0 };
        let halved = |number| Scales::Plain { number, bias: false, factor: 0.5 };
        let nested = |signed, minimum| Scales::Nested { signed, minimum };
        match format {
            Format::F32 => float(Codes::F32),
            Format::F16 => float(Codes::F16),
            Format::BF16 => float(Codes::BF16),
            Format::F8E4M3 => float(Codes::E4M3),
            Format::F8E4M3Block128 => Self::new(Codes::E4M3, plain(Number::F32, false), 128, 128),
            Format::MxFp8 => Self::new(Codes::E4M3, plain(Number::E8M0, false), 32, 32),
            Format::MxFp4 => integers(e2m1, halved(Number::E8M0), 32, 32),
            Format::NvFp4 => integers(e2m1, halved(Number::E4M3), 32, 16),
            Format::Affine { bits, group, scale } => {
                integers(unsigned(bits, 0), plain(scale.into(), true), group as usize, group as usize)
            }
            Format::Q4_0 => integers(unsigned(4, 8), plain(Number::F16, false), 32, 32),
            Format::Q4_1 => integers(unsigned(4, 0), plain(Number::F16, true), 32, 32),
            Format::Q5_0 => integers(unsigned(5, 16), plain(Number::F16, false), 32, 32),
            Format::Q5_1 => integers(unsigned(5, 0), plain(Number::F16, true), 32, 32),
            Format::Q8_0 => integers(unsigned(8, 128), plain(Number::F16, false), 32, 32),
            Format::IQ4NL => integers(iq4, plain(Number::F16, false), 32, 32),
            Format::Q2K => integers(unsigned(2, 0), nested(false, true), 256, 16),
            Format::Q3K => integers(unsigned(3, 4), nested(true, false), 256, 16),
            Format::Q4K => integers(unsigned(4, 0), nested(false, true), 256, 32),
            Format::Q5K => integers(unsigned(5, 0), nested(false, true), 256, 32),
            Format::Q6K => integers(unsigned(6, 32), nested(true, false), 256, 16),
            Format::IQ4XS => integers(iq4, nested(true, false), 256, 32),
        }
    }

    /// The integer codes, if the values are integers.
    pub fn integers(&self) -> Option<&Integers> {
        match &self.codes {
            Codes::Integers(integers) => Some(integers),
            _ => None,
        }
    }

    /// Whether something is added to the scaled codes.
    pub fn has_bias(&self) -> bool {
        matches!(self.scales, Scales::Plain { bias: true, .. } | Scales::Nested { minimum: true, .. })
    }

    /// Sizes in bytes of the scales of one row of a tile, in the order in which they are stored.
    pub fn scale_sizes(&self) -> impl Iterator<Item = usize> {
        self.scales.sizes(self.groups)
    }
}

impl Codes {
    /// Bits of one stored value.
    fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::BF16 => 16,
            Self::E4M3 => 8,
            Self::Integers(integers) => integers.bits as usize,
        }
    }
}

impl Scales {
    /// Sizes in bytes of one row's scales of a tile with `groups` groups.
    fn sizes(self, groups: usize) -> impl Iterator<Item = usize> {
        let (heads, head_bytes, tail) = match self {
            Self::One => (0, 0, 0),
            Self::Plain { number, bias, .. } => (groups * (1 + usize::from(bias)), number.bytes(), 0),
            Self::Nested { minimum, .. } => {
                let kinds = 1 + usize::from(minimum);
                (kinds, 2, groups * kinds)
            }
        };
        std::iter::repeat_n(head_bytes, heads).chain(std::iter::repeat_n(1, tail))
    }
}
