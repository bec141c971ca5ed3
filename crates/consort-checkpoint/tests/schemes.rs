//! Every quantization scheme, against values that the reference libraries computed (`schemes/make.py`).
#![allow(clippy::single_range_in_vec_init)] // selections are lists of ranges, and often of one

use std::ops::Range;
use std::path::{Path, PathBuf};

use consort_checkpoint::Checkpoint;
use consort_compute::Matrix;
use proptest::prelude::*;

fn directories() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemes");
    let entries = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut directories: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    directories.sort();
    directories
}

fn decoded(matrix: &Matrix<'_>) -> Vec<Vec<f32>> {
    let mut rows = vec![vec![0.0; matrix.cols]; matrix.rows];
    rows.iter_mut().enumerate().for_each(|(row, out)| matrix.decode_row(row, out));
    rows
}

/// The expected values, read with the container's own code: plain f32 tensors are tested by hand elsewhere.
fn expected(directory: &Path) -> Checkpoint {
    let plain = tempfile::tempdir().unwrap();
    std::fs::copy(directory.join("expected.safetensors"), plain.path().join("model.safetensors")).unwrap();
    std::fs::write(plain.path().join("config.json"), r#"{"model_type": "expected"}"#).unwrap();
    let checkpoint = Checkpoint::open(plain.path()).unwrap();
    // The map keeps the file alive once it has been read.
    for tensor in checkpoint.tensors() {
        checkpoint.read_f32(&tensor.name).unwrap();
    }
    checkpoint
}

fn rows_of(shape: &[usize]) -> usize {
    shape[..shape.len() - 1].iter().product()
}

#[test]
fn every_scheme_decodes_to_its_reference() {
    let directories = directories();
    assert!(directories.len() == 30, "the fixtures are missing");
    for directory in directories {
        let name = directory.file_name().unwrap().to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(&directory).unwrap_or_else(|error| panic!("{name}: {error}"));
        let expected = expected(&directory);
        for reference in expected.tensors() {
            let info = checkpoint.tensor(&reference.name).unwrap_or_else(|| panic!("{name}: no {}", reference.name));
            assert_eq!(info.shape, reference.shape, "{name}: {}", reference.name);
            let rows = 0..rows_of(&info.shape);
            let found = checkpoint.read(&[&info.name], std::slice::from_ref(&rows), None).unwrap();
            let wanted = expected.read(&[&info.name], &[rows], None).unwrap();
            for (row, (found, wanted)) in decoded(&found).iter().zip(decoded(&wanted)).enumerate() {
                for (column, (&found, &wanted)) in found.iter().zip(&wanted).enumerate() {
                    // Two roundings of an f32 product or sum; every real mistake is far larger.
                    let tolerance = wanted.abs().max(0.25) * 4.0 * f32::EPSILON;
                    assert!((found - wanted).abs() <= tolerance, "{name}[{row}, {column}]: {found} is not {wanted}");
                }
            }
        }
    }
}

/// Cuts `0..units` at `cuts` into as many consecutive runs, some of which may be empty.
fn runs(units: usize, cuts: &[f64], unit: usize, limit: usize) -> Vec<Range<usize>> {
    let mut bounds: Vec<usize> = cuts.iter().map(|cut| (cut * units as f64) as usize * unit).collect();
    bounds.extend([0, limit]);
    bounds.sort_unstable();
    bounds.windows(2).map(|pair| pair[0].min(limit)..pair[1].min(limit)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// What 1 to 4 ranks read of a random uneven split, by rows and by columns, is the whole tensor, bit for bit.
    #[test]
    fn parts_of_ranks_make_up_the_checkpoint(
        row_cuts in prop::collection::vec(0.0..1.0f64, 0..4), column_cuts in prop::collection::vec(0.0..1.0f64, 0..4),
    ) {
        for directory in directories() {
            let checkpoint = Checkpoint::open(&directory).unwrap();
            for info in checkpoint.tensors() {
                let (rows, cols) = (rows_of(&info.shape), info.shape[info.shape.len() - 1]);
                let block = info.format.block_values();
                let whole = decoded(&checkpoint.read(&[&info.name], &[0..rows], None).unwrap());
                let mut seen = vec![vec![0u8; cols]; rows];
                for row_run in runs(rows, &row_cuts, 1, rows) {
                    for column_run in runs(cols.div_ceil(block), &column_cuts, block, cols) {
                        let columns = [column_run.clone()];
                        let part = checkpoint.read(&[&info.name], std::slice::from_ref(&row_run), Some(&columns)).unwrap();
                        prop_assert_eq!((part.rows, part.cols), (row_run.len(), column_run.len()));
                        for (row, values) in row_run.clone().zip(decoded(&part)) {
                            for (column, value) in column_run.clone().zip(values) {
                                prop_assert_eq!(value.to_bits(), whole[row][column].to_bits());
                                seen[row][column] += 1;
                            }
                        }
                    }
                }
                prop_assert!(seen.iter().flatten().all(|&count| count == 1), "{} is not covered once", info.name);
            }
        }
    }

    /// Several runs of rows and columns come out in the order in which they were asked for.
    #[test]
    fn runs_of_a_selection_keep_their_order(first in 0..6usize, second in 6..12usize, column in 0..2usize) {
        for directory in directories() {
            let checkpoint = Checkpoint::open(&directory).unwrap();
            let info = &checkpoint.tensors()[0];
            let (rows, block) = (rows_of(&info.shape), info.format.block_values());
            let cols = info.shape[info.shape.len() - 1];
            if cols < 4 * block || rows < 12 {
                continue;
            }
            let whole = decoded(&checkpoint.read(&[&info.name], &[0..rows], None).unwrap());
            let row_runs = [second..second + 2, first..first + 1];
            let column_runs = [2 * block..3 * block, column * block..(column + 1) * block];
            // The stack repeats the tensor: its rows come after the first copy's.
            let stacked = [row_runs[0].clone(), row_runs[1].clone(), rows + first..rows + first + 1];
            let part = checkpoint.read(&[&info.name, &info.name], &stacked, Some(&column_runs)).unwrap();
            let rows = [second, second + 1, first, first];
            for (row, values) in rows.into_iter().zip(decoded(&part)) {
                let wanted = column_runs.iter().cloned().flatten().map(|column| whole[row][column].to_bits());
                prop_assert!(values.iter().map(|value| value.to_bits()).eq(wanted), "{}", info.name);
            }
        }
    }
}
