//! Parts of quantized weights that are smaller than a block: rows that share a scale with another rank's decode as in the whole,
//! and columns are cut at blocks or not at all.
#![allow(clippy::single_range_in_vec_init)] // selections are lists of ranges, and often of one

mod common;

use std::ops::Range;

use common::{f32_bytes, model, safetensors_of};
use consort_checkpoint::{Checkpoint, CheckpointError};
use consort_compute::Matrix;
use tempfile::TempDir;

const W: &str = "model.layers.0.mlp.up_proj";
const FP8: &str = r#""quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}"#;
const MLX: &str = r#""quantization": {"bits": 4, "group_size": 64}"#;

/// The E4M3 code of a value by its place; none is NaN.
fn code(place: usize) -> u8 {
    (place * 89 % 251) as u8 & 0xf6
}

/// What the code means: sign, four bits of exponent with a bias of 7, three of mantissa.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let size = if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { size } else { -size }
}

/// A matrix with a scale of its own for each block.
fn fp8(rows: usize, columns: usize) -> TempDir {
    let codes: Vec<u8> = (0..rows * columns).map(code).collect();
    let scale_shape = [rows.div_ceil(128), columns.div_ceil(128)];
    let scales: Vec<f32> = (0..scale_shape[0] * scale_shape[1]).map(|i| 1.0 + i as f32 / 64.0).collect();
    let (weight, scale) = (format!("{W}.weight"), format!("{W}.weight_scale_inv"));
    let scales = f32_bytes(&scales);
    model(
        FP8,
        &safetensors_of(&[(&weight, "F8_E4M3", &[rows, columns], &codes), (&scale, "F32", &scale_shape, &scales)]),
    )
}

fn mlx(rows: usize, columns: usize) -> TempDir {
    let codes: Vec<u8> = (0..rows * columns / 2).map(|i| (i * 89 % 251) as u8).collect();
    let halves: Vec<u8> = (0..rows * columns / 64).flat_map(|i| (0x3c00 + i as u16 % 1024).to_le_bytes()).collect();
    let [weight, scales, biases] = ["weight", "scales", "biases"].map(|parameter| format!("{W}.{parameter}"));
    let groups = [rows, columns / 64];
    model(
        MLX,
        &safetensors_of(&[
            (&weight, "U32", &[rows, columns / 8], &codes),
            (&scales, "F16", &groups, &halves),
            (&biases, "F16", &groups, &halves),
        ]),
    )
}

fn bits(matrix: &Matrix<'_>) -> Vec<Vec<u32>> {
    let mut row = vec![0.0; matrix.cols];
    let decoded = |at| {
        matrix.decode_row(at, &mut row);
        row.iter().map(|value| value.to_bits()).collect()
    };
    (0..matrix.rows).map(decoded).collect()
}

fn read(checkpoint: &Checkpoint, rows: Range<usize>, columns: Range<usize>) -> Result<Vec<Vec<u32>>, CheckpointError> {
    checkpoint.read(&[&format!("{W}.weight")], &[rows], Some(&[columns])).map(|matrix| bits(&matrix))
}

fn ranges(length: usize, ranks: usize) -> impl Iterator<Item = Range<usize>> {
    let part = length / ranks;
    (0..ranks).map(move |rank| rank * part..(rank + 1) * part)
}

/// Widths and ranks that published models were divided by: 64, 192 and 576 rows or columns for each rank, of blocks of 128.
#[test]
fn rows_are_cut_anywhere_and_columns_at_blocks() {
    for (width, ranks) in [(512, 8), (768, 4), (18432, 32)] {
        let directory = fp8(width, 128);
        let opened = Checkpoint::open(directory.path()).unwrap();
        let whole = read(&opened, 0..width, 0..128).unwrap();
        let parts = ranges(width, ranks).flat_map(|part| read(&opened, part, 0..128).unwrap());
        assert!(parts.eq(whole), "{width} rows on {ranks} ranks");

        let directory = fp8(3, width);
        let opened = Checkpoint::open(directory.path()).unwrap();
        for part in ranges(width, ranks) {
            let inside = [part.start, part.end].into_iter().find(|bound| bound % 128 != 0);
            match (read(&opened, 0..3, part.clone()), inside) {
                (Ok(_), None) => {}
                (Err(CheckpointError::CutBlock { column, block: 128, .. }), Some(bound)) => assert_eq!(column, bound),
                (outcome, _) => panic!("{part:?} of {width}: {outcome:?}"),
            }
        }
        // Cut at blocks, however unevenly, the parts make up the whole.
        let whole = read(&opened, 0..3, 0..width).unwrap();
        let at = width / 128 / 2 * 128;
        let halves = [read(&opened, 0..3, 0..at).unwrap(), read(&opened, 0..3, at..width).unwrap()];
        let joined: Vec<Vec<u32>> = (0..3).map(|row| [&halves[0][row][..], &halves[1][row][..]].concat()).collect();
        assert_eq!(joined, whole, "{width} columns");
    }
}

#[test]
fn a_row_is_scaled_by_the_block_that_it_lies_in() {
    let directory = fp8(512, 128);
    let opened = Checkpoint::open(directory.path()).unwrap();
    for rank in 0..8 {
        let row = rank * 64;
        let values = read(&opened, row..row + 1, 0..128).unwrap().remove(0);
        let unscaled = (0..128).map(|column| e4m3(code(row * 128 + column)));
        let scale = 1.0 + (rank / 2) as f32 / 64.0;
        assert!(unscaled.map(|value| (value * scale).to_bits()).eq(values), "rank {rank}");
    }
}

#[test]
fn groups_of_mlx_are_not_cut_either() {
    let directory = mlx(6, 128);
    let opened = Checkpoint::open(directory.path()).unwrap();
    let error = read(&opened, 0..6, 0..32).unwrap_err();
    assert!(matches!(error, CheckpointError::CutBlock { column: 32, block: 64, .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("column 32") && message.contains("block of 64"), "{message}");
    let whole = read(&opened, 0..6, 0..128).unwrap();
    let halves = [read(&opened, 0..6, 0..64).unwrap(), read(&opened, 0..6, 64..128).unwrap()];
    let joined: Vec<Vec<u32>> = (0..6).map(|row| [&halves[0][row][..], &halves[1][row][..]].concat()).collect();
    assert_eq!(joined, whole);
}
