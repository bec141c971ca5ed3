//! The number formats against other implementations: ml_dtypes, gguf and mlx. `oracle/formats.py` writes the fixtures.

use consort_compute::{
    Format, Matrix, ScaleFormat,
    decode::codes::{E2M1, E4M3, e8m0},
};
use proptest::prelude::*;
use serde::Deserialize;

/// Every format but the affine ones, by its name.
const FORMATS: [Format; 20] = [
    Format::F32,
    Format::F16,
    Format::BF16,
    Format::F8E4M3,
    Format::F8E4M3Block128,
    Format::MxFp8,
    Format::MxFp4,
    Format::NvFp4,
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

fn affine_formats() -> impl Iterator<Item = Format> {
    let scales = [ScaleFormat::F16, ScaleFormat::BF16, ScaleFormat::F32];
    let groups = [32, 64, 128];
    let bits = [2, 3, 4, 5, 6, 8];
    bits.into_iter().flat_map(move |bits| {
        groups
            .into_iter()
            .flat_map(move |group| scales.into_iter().map(move |scale| Format::Affine { bits, group, scale }))
    })
}

#[derive(Deserialize)]
struct Case {
    format: String,
    scale: Option<String>,
    #[serde(default)]
    bytes: String,
    values: String,
}

impl Case {
    fn read(fixture: &str) -> Vec<Self> {
        let path = format!("{}/tests/data/{fixture}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn format(&self) -> Format {
        let scale_of = |format: &Format| match format {
            Format::Affine { scale, .. } => Some(format!("{scale:?}")),
            _ => None,
        };
        FORMATS
            .into_iter()
            .chain(affine_formats())
            .find(|format| format.to_string() == self.format && scale_of(format) == self.scale)
            .unwrap_or_else(|| panic!("no format {} {:?}", self.format, self.scale))
    }

    fn bytes(&self) -> Vec<u8> {
        hexadecimal(&self.bytes)
    }

    fn values(&self) -> Vec<f32> {
        hexadecimal(&self.values).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

fn hexadecimal(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

/// Equal bits, except that any NaN is as good as another.
fn assert_same(name: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{name}");
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{name}: value {i} is {a:e}, not {b:e}");
    }
}

fn decode(format: Format, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / format.block_bytes() * format.block_values()];
    format.decode_row(bytes, &mut values);
    values
}

#[test]
fn every_code_of_the_small_floats_has_the_value_that_ml_dtypes_gives_it() {
    let cases = Case::read("codes.json");
    for case in &cases {
        let ours: Vec<f32> = match case.format.as_str() {
            "E4M3" => E4M3.to_vec(),
            "E2M1" => E2M1.to_vec(),
            "E8M0" => (0..=255).map(e8m0).collect(),
            other => panic!("no table {other}"),
        };
        assert_same(&case.format, &ours, &case.values());
    }
    assert_eq!(cases.len(), 3);
}

#[test]
fn the_published_values_of_fp8_and_fp4_are_met() {
    // OCP 8-bit floating point specification, table 2, and OCP microscaling specification, table 3.
    for (code, value) in [(0x01, 0.001953125), (0x08, 0.015625), (0x38, 1.0), (0x7E, 448.0), (0xFE, -448.0)] {
        assert_eq!(E4M3[code], value);
    }
    assert!(E4M3[0x7F].is_nan() && E4M3[0xFF].is_nan() && E4M3[0x80].is_sign_negative());
    assert_eq!(E2M1[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
}

#[test]
fn stored_blocks_decode_to_what_gguf_and_mlx_read() {
    let cases = Case::read("decode.json");
    for case in &cases {
        assert_same(
            &format!("{} {:?}", case.format, case.scale),
            &decode(case.format(), &case.bytes()),
            &case.values(),
        );
    }
    assert_eq!(cases.len(), 24);
}

#[test]
fn encoded_blocks_are_those_that_gguf_and_mlx_write() {
    let cases = Case::read("encode.json");
    for case in &cases {
        let (format, values) = (case.format(), case.values());
        let mut bytes = vec![0xAA; format.row_bytes(values.len())];
        format.encode_row(&values, &mut bytes);
        let theirs = case.bytes();
        for (block, (a, b)) in bytes.chunks(format.block_bytes()).zip(theirs.chunks(format.block_bytes())).enumerate() {
            assert_eq!(a, b, "{format} {:?}, block {block}", case.scale);
        }
        assert_eq!(bytes.len(), theirs.len());
    }
    assert_eq!(cases.len(), 11);
}

#[test]
fn nvfp4_values_are_code_times_block_scale_times_global_scale() {
    // Nibble 7 is 6, byte 0x40 is 2, and 0.5 is a factor: a divisor would give 24.
    let mut block = [0u8; 9];
    (block[0], block[1]) = (0x40, 0x27);
    let matrix = Matrix::new(Format::NvFp4, 1, 16, block.to_vec()).with_row_scale(vec![0.5]);
    let mut row = [0.0; 16];
    matrix.decode_row(0, &mut row);
    assert_eq!(row[..3], [6.0, 1.0, 0.0]);
}

#[test]
fn fp8_blocks_multiply_by_their_own_scale() {
    let mut row = Vec::new();
    for scale in [3.0f32, 4.0] {
        row.extend(scale.to_le_bytes());
        row.extend([0x38; 128]);
    }
    let mut values = [0.0; 130];
    Format::F8E4M3Block128.decode_row(&row, &mut values);
    assert_eq!((values[127], values[128], values[129]), (3.0, 4.0, 4.0));
}

#[test]
fn damage_shows_as_nan() {
    let broken = [1.0, f32::NAN, -2.0, f32::INFINITY];
    for format in [Format::F8E4M3Block128, Format::MxFp8, Format::MxFp4, Format::NvFp4, Format::Q8_0] {
        let mut bytes = vec![0; format.row_bytes(broken.len())];
        format.encode_row(&broken, &mut bytes);
        assert!(decode(format, &bytes)[1].is_nan(), "{format}");
    }
}

#[test]
fn large_numbers_saturate() {
    let expected = [
        (Format::F16, 65504.0),
        (Format::BF16, half::bf16::MAX.to_f32()),
        (Format::F8E4M3, 448.0),
        (Format::NvFp4, 448.0 * 6.0),
        (Format::Q8_0, 65504.0 * 127.0),
    ];
    for (format, largest) in expected {
        let mut bytes = vec![0; format.row_bytes(2)];
        format.encode_row(&[f32::MAX, -f32::MAX], &mut bytes);
        assert_eq!(decode(format, &bytes)[..2], [largest, -largest], "{format}");
    }
}

#[test]
fn ties_go_to_the_even_code() {
    let mut byte = [0];
    // Between 1 (0x38) and 1.125 (0x39), and between 1.125 and 1.25 (0x3A).
    for (value, code) in [(1.0625, 0x38), (1.1875, 0x3A), (-1.1875, 0xBA)] {
        Format::F8E4M3.encode_row(&[value], &mut byte);
        assert_eq!(byte[0], code, "{value}");
    }
    let ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let mut block = [0; 17];
    Format::MxFp4.encode_row(&ties, &mut block);
    assert_eq!(decode(Format::MxFp4, &block)[..8], [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]);
}

#[test]
fn a_microscaling_scale_is_the_smallest_power_of_two_that_holds_the_block() {
    let code = |largest: f32| {
        let mut block = [0; 17];
        Format::MxFp4.encode_row(&[-largest], &mut block);
        block[0]
    };
    let next_up = |x: f32| f32::from_bits(x.to_bits() + 1);
    for exponent in [-126, -1, 0, 1, 100, 125] {
        let fits = 6.0 * 2f32.powi(exponent);
        assert_eq!((code(fits), code(next_up(fits))), ((exponent + 127) as u8, (exponent + 128) as u8));
    }
    assert_eq!((code(0.0), code(f32::MIN_POSITIVE), code(f32::MAX)), (0, 0, 253));
}

/// How far a value may be from what it decodes to, as a share of the largest magnitude of its block.
fn largest_error(format: Format) -> f32 {
    match format {
        Format::F32 => 0.0,
        Format::F16 => 1.0 / 2048.0,
        Format::BF16 => 1.0 / 256.0,
        // Four significant bits.
        Format::F8E4M3 => 1.0 / 16.0,
        // Half of the widest step: 32 of 448, 2 of 6. A scale rounded to a power of two is up to twice as large.
        Format::F8E4M3Block128 => 16.0 / 448.0,
        Format::MxFp8 => 2.0 * 16.0 / 448.0,
        Format::MxFp4 => 2.0 / 6.0,
        // A scale rounded to E4M3 is off by up to a sixteenth; the largest value may saturate by so much.
        Format::NvFp4 => 1.0 / 6.0 * (1.0 + 1.0 / 16.0),
        Format::Q8_0 => 0.5 / 127.0 + 1.0 / 2048.0,
        // Half a step, and scale and bias rounded. The values span up to twice the largest magnitude.
        Format::Affine { bits, scale, .. } => {
            let rounding = match scale {
                ScaleFormat::F16 => 1.0 / 2048.0,
                ScaleFormat::BF16 => 1.0 / 256.0,
                ScaleFormat::F32 => 1e-6,
            };
            // Moving the scale so that zero is met makes the last code fall short by up to half a step once more.
            2.0 / ((1u32 << bits) - 1) as f32 + 3.0 * rounding
        }
        _ => unreachable!(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_encoded_decodes_to_nearly_the_same(
        values in prop::collection::vec(-1f32..1.0, 2 * 200), magnitude in -1i32..5,
    ) {
        let values: Vec<f32> = values.iter().map(|x| x * 10f32.powi(magnitude)).collect();
        for format in FORMATS.into_iter().chain(affine_formats()).filter(|format| format.can_encode()) {
            let matrix = Matrix::encode(format, 2, 200, &values);
            for row in 0..2 {
                let mut decoded = [0.0; 200];
                matrix.decode_row(row, &mut decoded);
                let blocks = values[row * 200..][..200].chunks(format.block_values());
                for (ours, theirs) in blocks.zip(decoded.chunks(format.block_values())) {
                    let largest = ours.iter().fold(0f32, |m, x| m.max(x.abs()));
                    // Half of the smallest scale of NVFP4, a share of the global one, and of the subnormal f16 scales.
                    let floor = 10f32.powi(magnitude) / 448.0 / 1024.0 + 1e-5;
                    let bound = largest_error(format) * largest + floor;
                    for (a, b) in ours.iter().zip(theirs) {
                        prop_assert!((a - b).abs() <= bound, "{}: {} became {}", format, a, b);
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_may_end_inside_a_block(cols in 1usize..300, seed in any::<u8>()) {
        for format in FORMATS.into_iter().chain(affine_formats()) {
            let bytes: Vec<u8> = (0..format.row_bytes(cols)).map(|i| (i as u8).wrapping_mul(37).wrapping_add(seed)).collect();
            let mut part = vec![0.0; cols];
            format.decode_row(&bytes, &mut part);
            let whole = decode(format, &bytes);
            prop_assert!(part.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()), "{}", format);
        }
    }
}
