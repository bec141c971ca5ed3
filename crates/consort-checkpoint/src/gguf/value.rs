//! Values of GGUF metadata.

use std::fmt;

use crate::error::excerpt;

/// A value of GGUF metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Unsigned 8 bit.
    U8(u8),
    /// Signed 8 bit.
    I8(i8),
    /// Unsigned 16 bit.
    U16(u16),
    /// Signed 16 bit.
    I16(i16),
    /// Unsigned 32 bit.
    U32(u32),
    /// Signed 32 bit.
    I32(i32),
    /// Single precision.
    F32(f32),
    /// Truth value.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Values of one type.
    Array(Vec<Value>),
    /// Unsigned 64 bit.
    U64(u64),
    /// Signed 64 bit.
    I64(i64),
    /// Double precision.
    F64(f64),
}

impl Value {
    /// Any integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// Any number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(value) => Some(value.into()),
            Self::F64(value) => Some(value),
            Self::I8(value) => Some(value.into()),
            Self::I16(value) => Some(value.into()),
            Self::I32(value) => Some(value.into()),
            Self::I64(value) => Some(value as f64),
            _ => self.as_u64().map(|value| value as f64),
        }
    }

    /// A truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    /// Text.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(value) = self { Some(value) } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&[Value]> {
        if let Self::Array(values) = self { Some(values) } else { None }
    }
}

/// For messages: a number as it is, the beginning of a text, the length of a list.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(value) => write!(f, "{value}"),
            Self::I8(value) => write!(f, "{value}"),
            Self::U16(value) => write!(f, "{value}"),
            Self::I16(value) => write!(f, "{value}"),
            Self::U32(value) => write!(f, "{value}"),
            Self::I32(value) => write!(f, "{value}"),
            Self::U64(value) => write!(f, "{value}"),
            Self::I64(value) => write!(f, "{value}"),
            Self::F32(value) => write!(f, "{value}"),
            Self::F64(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::String(text) => write!(f, "{:?}", excerpt(text)),
            Self::Array(values) => write!(f, "a list of {}", values.len()),
        }
    }
}
