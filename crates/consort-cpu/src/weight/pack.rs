//! From stored rows to tiles.

use consort_compute::{Format, Matrix};

use super::layout::{Codes, Layout, STEP};
use super::{PackedWeight, split::split};
use crate::isa::{LANES, Quads};
use crate::memory::Disjoint;
use crate::pool::Pool;

/// Values of the largest tile row.
const LARGEST_BLOCK: usize = 256;
/// Bytes of the largest tile row's scales.
const LARGEST_SCALES: usize = 64;

/// The rows of a tile, one byte for each code.
type Codes16 = [[u8; LARGEST_BLOCK]; LANES];

/// Lays the rows of `piece` out as the rows from `first_row` on.
pub fn pack(weight: &mut PackedWeight, first_row: usize, piece: &Matrix<'_>, pool: &Pool) {
    let PackedWeight { rows, layout, data, row_scale, .. } = weight;
    assert!(first_row.is_multiple_of(LANES) && first_row + piece.rows <= *rows, "{first_row} + {} rows", piece.rows);
    let panel_bytes = piece.cols.div_ceil(layout.block) * layout.tile_bytes;
    let first_panel = first_row / LANES;
    let parts = Disjoint::new(data);
    pool.run(piece.rows.div_ceil(LANES), |panel| {
        // SAFETY: each panel is one task's, and panels don't overlap.
        let out = unsafe { parts.slice((first_panel + panel) * panel_bytes, panel_bytes) };
        pack_panel(piece, layout, panel, out);
    });
    if let Some(factors) = row_factors(piece, layout) {
        if row_scale.is_empty() {
            row_scale.resize(*rows, 1.0);
            row_scale.resize(rows.next_multiple_of(LANES), 0.0);
        }
        row_scale[first_row..first_row + piece.rows].copy_from_slice(&factors);
    }
}

/// The factor of each row. Kernels read FP8 through half precision, which divides it by 256 and makes numbers of NaNs: the
/// factor puts both right.
fn row_factors(matrix: &Matrix<'_>, layout: &Layout) -> Option<Vec<f32>> {
    let e4m3 = layout.codes == Codes::E4M3;
    if matrix.row_scale.is_none() && !e4m3 {
        return None;
    }
    let mut factors = matrix.row_scale.clone().unwrap_or_else(|| vec![1.0; matrix.rows]);
    if e4m3 {
        let (values, bytes) = (matrix.format.block_values(), matrix.format.block_bytes());
        for (row, factor) in factors.iter_mut().enumerate() {
            let mut codes = matrix.row(row).chunks_exact(bytes).flat_map(|block| &block[bytes - values..]);
            let damaged = codes.any(|code| code & 0x7F == 0x7F);
            *factor = if damaged { f32::NAN } else { *factor * 256.0 };
        }
    }
    Some(factors)
}

fn pack_panel(matrix: &Matrix<'_>, layout: &Layout, panel: usize, out: &mut [u8]) {
    let rows = panel * LANES..matrix.rows.min((panel + 1) * LANES);
    let bytes = matrix.format.block_bytes() * (layout.block / matrix.format.block_values());
    for (tile, out) in out.chunks_exact_mut(layout.tile_bytes).enumerate() {
        // The last tile may hold fewer stored blocks than fit: the rest of it stays zero.
        let stored = |row: usize| {
            let row = matrix.row(row);
            &row[tile * bytes..row.len().min((tile + 1) * bytes)]
        };
        match layout.codes {
            Codes::F32 => interleave::<4>(rows.clone().map(stored), out),
            Codes::F16 => interleave::<2>(rows.clone().map(stored), out),
            Codes::BF16 => interleave_pairs(rows.clone().map(stored), out),
            Codes::E4M3 | Codes::Integers(_) => pack_codes(matrix.format, layout, rows.clone().map(stored), out),
        }
    }
}

/// Values of `SIZE` bytes, 16 rows side by side.
fn interleave<'a, const SIZE: usize>(rows: impl Iterator<Item = &'a [u8]>, out: &mut [u8]) {
    for (lane, row) in rows.enumerate() {
        for (column, value) in row.chunks_exact(SIZE).enumerate() {
            out[(column * LANES + lane) * SIZE..][..SIZE].copy_from_slice(value);
        }
    }
}

/// Pairs of columns, 16 rows side by side. The first column is the upper half of each lane, because products of pairs begin
/// with that one.
fn interleave_pairs<'a>(rows: impl Iterator<Item = &'a [u8]>, out: &mut [u8]) {
    for (lane, row) in rows.enumerate() {
        for (column, value) in row.as_chunks::<2>().0.iter().enumerate() {
            out[2 * (2 * (column / 2 * LANES + lane) + 1 - column % 2)..][..2].copy_from_slice(value);
        }
    }
}

fn pack_codes<'a>(format: Format, layout: &Layout, rows: impl Iterator<Item = &'a [u8]>, out: &mut [u8]) {
    let (scale_out, code_out) = out.split_at_mut(layout.scale_bytes);
    let mut codes: Codes16 = [[0; LARGEST_BLOCK]; LANES];
    for (lane, row) in rows.enumerate() {
        let mut scales = [0; LARGEST_SCALES];
        let values = format.block_values();
        let scales_of_block = layout.scale_sizes().sum::<usize>() * values / layout.block;
        for (i, block) in row.chunks_exact(format.block_bytes()).enumerate() {
            split(format, block, &mut codes[lane][i * values..][..values], &mut scales[i * scales_of_block..]);
        }
        let mut from = 0;
        for size in layout.scale_sizes() {
            scale_out[from * LANES + lane * size..][..size].copy_from_slice(&scales[from..from + size]);
            from += size;
        }
    }
    match layout.codes {
        Codes::Integers(integers) => {
            for (step, out) in code_out.chunks_exact_mut(integers.step_bytes()).enumerate() {
                let code = |lane: usize, column: usize| codes[lane][step * STEP + column];
                pack_step(integers.bits as usize, code, out);
            }
        }
        _ => {
            for (quad, out) in code_out.as_chunks_mut::<{ 4 * LANES }>().0.iter_mut().enumerate() {
                pack_bytes_of_pairs(|lane, column| codes[lane][4 * quad + column], out);
            }
        }
    }
}

/// Four columns of 16 rows, so that what [`pairs_of_e4m3`](crate::isa::Simd::pairs_of_e4m3) makes of them lies as bfloat16 does.
fn pack_bytes_of_pairs(code: impl Fn(usize, usize) -> u8, out: &mut Quads) {
    for lane in 0..LANES {
        for column in 0..4 {
            out[lane / 4 * LANES + column / 2 * 8 + lane % 4 * 2 + 1 - column % 2] = code(lane, column);
        }
    }
}

/// 32 columns of 16 rows. [`unpack`](super::unpack) reads what this writes: codes go by quads, where a lane's four bytes are
/// four consecutive columns, and quad `q` is columns `4q..4q + 4`.
fn pack_step(bits: usize, code: impl Fn(usize, usize) -> u8, out: &mut [u8]) {
    /// Columns of a lane that lie side by side.
    const QUAD: usize = 4;
    // `fields` codes of `bits` bits each, from bit `shift` of the code on, share a byte.
    let plane = |out: &mut [u8], bits: usize, shift: usize| {
        let (fields, mask) = (8 / bits, u8::MAX >> (8 - bits));
        for (i, out) in out.iter_mut().enumerate() {
            let (vector, lane, within) = (i / (QUAD * LANES), i / QUAD % LANES, i % QUAD);
            let field =
                |field| (code(lane, (vector * fields + field) * QUAD + within) >> shift & mask) << (bits * field);
            *out = (0..fields).map(field).fold(0, |byte, field| byte | field);
        }
    };
    // The lowest 8, 4 or 2 bits, then what is above them.
    let low = match bits {
        8 => 8,
        4.. => 4,
        _ => 2,
    };
    let (main, rest) = out.split_at_mut(LANES * STEP * low / 8);
    plane(main, low, 0);
    if !rest.is_empty() {
        plane(rest, bits - low, low);
    }
}
