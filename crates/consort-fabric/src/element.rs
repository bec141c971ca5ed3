//! The values that collectives move and reduce.

use half::bf16;

/// Plain values: any bytes are one, and none of its bytes is padding.
///
/// # Safety
/// Both must hold.
pub unsafe trait Plain: Copy + Send + Sync + 'static {
    /// The values' bytes, as they lie in memory.
    fn bytes(values: &[Self]) -> &[u8] {
        // SAFETY: plain values have no padding, and the length is theirs.
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
    }

    /// The values' bytes, to be changed.
    fn bytes_mut(values: &mut [Self]) -> &mut [u8] {
        // SAFETY: as above, and any bytes are plain values.
        unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
    }
}

macro_rules! plain {
    ($($kind:ty)*) => {
        // SAFETY: numbers of one piece.
        $(unsafe impl Plain for $kind {})*
    };
}
plain!(u8 u16 u32 u64 i8 i16 i32 i64 f32 bf16);

/// Numbers that can be summed, always in f32.
pub trait Element: Plain + Default {
    /// The value, which f32 holds exactly.
    fn widen(self) -> f32;

    /// The nearest value of this kind.
    fn narrow(value: f32) -> Self;

    /// The value at the start of `bytes`.
    fn read(bytes: &[u8]) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Rounds to nearest, ties to even. A value that is no number stays none.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1))) >> 16;
        let quiet = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        Self::from_bits(u16::from_le_bytes([bytes[0], bytes[1]]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_rounded_as_its_crate_rounds_it() {
        let patterns = (0..=u16::MAX).flat_map(|high| {
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low: u32| f32::from_bits(u32::from(high) << 16 | low))
        });
        for value in patterns {
            let (ours, theirs) = (<bf16 as Element>::narrow(value), bf16::from_f32(value));
            assert!(ours == theirs && ours.to_bits() == theirs.to_bits() || value.is_nan() && ours.is_nan(), "{value}");
            assert!(ours.is_nan() || ours.widen().to_bits() == ours.to_f32().to_bits());
        }
    }
}
