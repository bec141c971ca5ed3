//! Matrix products with packed weights.
//!
//! `out = x · wᵀ` is computed in tasks of a few panels (16 output features each) by a block of activation rows. A task walks
//! the input features in chunks: it unpacks each panel's chunk into the first-level cache and lets register-blocked
//! microkernels multiply it with all the rows. Every output is the sum of its products in the order of the input features,
//! in one lane, by one thread: it depends neither on the number of threads nor on the other rows of the batch.

use std::cell::RefCell;
use std::ops::Range;

use consort_compute::portable::{HostBuffer, HostRouting};

use crate::activations::{Activations, FloatRow, IntegerRow, Prepared};
use crate::isa::{Isa, Kernel, LANES, Quads, Simd};
use crate::memory::Disjoint;
use crate::pool::Pool;
use crate::weight::{CHUNK, FloatChunk, IntegerChunk, Integers, PackedWeight, STEP};

/// Activation rows of a task: enough to make unpacking cheap, few enough that their chunk stays in the second-level cache.
const TASK_ROWS: usize = 192;
/// Panels of a task with many rows: each chunk of activations is read once for all of them.
const TASK_PANELS: usize = 4;
/// Tasks of each thread in a product with few rows.
const TASKS_OF_THREAD: usize = 8;
/// Up to this many rows a product waits for memory: small tasks, so that threads finish together.
const FEW_ROWS: usize = 8;
/// Rows of a register block: with two registers for 16 lanes, the accumulators and what they need fill 16 registers.
const BLOCK_ROWS: usize = 6;

thread_local! {
    /// Memory for prepared activations, of each thread that calls products.
    static PREPARED: RefCell<Prepared> = RefCell::default();
    /// Memory of each thread that computes them.
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        integers: [const { IntegerChunk::ZERO }; TASK_PANELS],
        floats: [const { FloatChunk::ZERO }; TASK_PANELS],
        sums: [[[0.0; LANES]; TASK_ROWS]; TASK_PANELS],
    }));
}

/// What a task works in.
struct Scratch {
    integers: [IntegerChunk; TASK_PANELS],
    floats: [FloatChunk; TASK_PANELS],
    /// Of each panel.
    sums: [Sums; TASK_PANELS],
}

/// Sums in progress: for each row, one vector of 16 output features.
type Sums = [[f32; LANES]; TASK_ROWS];

/// What a product needs besides its operands.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// The threads.
    pub pool: &'a Pool,
    /// The instructions.
    pub isa: Isa,
    /// How activations enter.
    pub activations: Activations,
}

/// `out = x · wᵀ`: `[n, cols] · [rows, cols]ᵀ → [n, rows]`.
pub fn matmul(machine: Machine<'_>, out: &mut HostBuffer, x: &HostBuffer, w: &PackedWeight) {
    assert_eq!(x.cols(), w.cols(), "input features");
    out.reshape(x.rows(), w.rows());
    let all = Group { features: 0..w.rows(), rows: Rows::All(x.rows()) };
    product(machine, out, x, w, w.rows(), &[all]);
}

/// Rows of the embedding table: `out[i] = w[tokens[i]]`, decoded exactly; zeros for a token past the table's end.
pub fn embed(machine: Machine<'_>, out: &mut HostBuffer, w: &PackedWeight, tokens: &[u32]) {
    out.reshape(tokens.len(), w.cols());
    let cols = w.cols();
    let rows = Disjoint::new(out.values_mut());
    machine.pool.run(tokens.len(), |i| {
        // SAFETY: each task has a row of its own.
        let out = unsafe { rows.slice(i * cols, cols) };
        if tokens[i] as usize >= w.rows() {
            return out.fill(0.0);
        }
        SCRATCH.with_borrow_mut(|scratch| machine.isa.run(DecodeRow { w, row: tokens[i] as usize, out, scratch }));
    });
}

/// Decodes one row of a weight.
struct DecodeRow<'a> {
    w: &'a PackedWeight,
    row: usize,
    out: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl Kernel for DecodeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { w, row, out, scratch: Scratch { integers, floats, .. } } = self;
        let (panel, lane) = (row / LANES, row % LANES);
        let factor = w.panel_scale(panel).map_or(1.0, |scale| scale[lane]);
        for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
            floats[0].unpack(simd, w.layout(), &mut integers[0], w.chunk(panel, chunk).0, &[]);
            out.iter_mut().zip(&floats[0].0).for_each(|(out, column)| *out = column[lane] * factor);
        }
    }
}

/// The product of each pair of a token and a local expert with that expert's part of `w`; pairs of other ranks become zero
/// rows. Each expert's pairs are one product, and all of them share one parallel loop.
pub fn expert_matmul(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    x: &HostBuffer,
    w: &PackedWeight,
    routing: &HostRouting,
) {
    thread_local!(static GROUPS: RefCell<Vec<Group<'static>>> = RefCell::default());
    assert_eq!(x.cols(), w.cols(), "input features");
    let experts = routing.local_experts().max(1);
    assert_eq!(w.rows() % experts, 0, "experts of one size");
    let features = w.rows() / experts;
    let pairs_of_row = if x.rows() == routing.pairs() { 1 } else { routing.top_k() };
    assert_eq!(x.rows() * pairs_of_row, routing.pairs(), "a row per token or a row per pair");
    out.reshape(routing.pairs(), features);
    out.values_mut().fill(0.0);
    GROUPS.with_borrow_mut(|memory| {
        // The list is empty between calls: only its memory stays.
        let mut groups: Vec<Group<'_>> = std::mem::take(memory);
        groups.extend(routing.groups().map(|(expert, pairs)| Group {
            features: expert * features..(expert + 1) * features,
            rows: Rows::Pairs { pairs, pairs_of_row },
        }));
        product(machine, out, x, w, features, &groups);
        groups.clear();
        *memory = recycle(groups);
    });
}

/// An empty list that keeps the memory of another.
fn recycle(empty: Vec<Group<'_>>) -> Vec<Group<'static>> {
    empty.into_iter().map(|_| unreachable!("the list is empty")).collect()
}

/// Some rows of activations times some output features of a weight.
struct Group<'a> {
    features: Range<usize>,
    rows: Rows<'a>,
}

/// Rows of activations, and where their results go.
#[derive(Clone, Copy)]
enum Rows<'a> {
    /// The first so many, each to the same row.
    All(usize),
    /// A row for each of these pairs; `pairs_of_row` consecutive pairs share an activation row.
    Pairs { pairs: &'a [u32], pairs_of_row: usize },
}

impl Rows<'_> {
    fn len(self) -> usize {
        match self {
            Self::All(rows) => rows,
            Self::Pairs { pairs, .. } => pairs.len(),
        }
    }

    fn input(self, i: usize) -> usize {
        match self {
            Self::All(_) => i,
            Self::Pairs { pairs, pairs_of_row } => pairs[i] as usize / pairs_of_row,
        }
    }

    fn output(self, i: usize) -> usize {
        match self {
            Self::All(_) => i,
            Self::Pairs { pairs, .. } => pairs[i] as usize,
        }
    }
}

/// Computes all groups; `features` is the number of columns of `out`.
fn product(
    machine: Machine<'_>,
    out: &mut HostBuffer,
    x: &HostBuffer,
    w: &PackedWeight,
    features: usize,
    groups: &[Group<'_>],
) {
    let Machine { pool, isa, activations } = machine;
    let most_rows = groups.iter().map(|group| group.rows.len()).max().unwrap_or(0);
    if most_rows == 0 {
        return;
    }
    // Groups need not begin where a panel does.
    let panels_of_group =
        if features.is_multiple_of(LANES) { features / LANES } else { (features + LANES - 2) / LANES + 1 };
    let few = most_rows <= FEW_ROWS;
    let (panels_at_once, task_panels) = match few {
        true => (1, (panels_of_group * groups.len() / (TASKS_OF_THREAD * pool.threads())).clamp(1, 32)),
        false => (TASK_PANELS, TASK_PANELS),
    };
    let panel_blocks = panels_of_group.div_ceil(task_panels);
    let row_blocks = most_rows.div_ceil(TASK_ROWS);
    let rows_of_block = most_rows.div_ceil(row_blocks).next_multiple_of(BLOCK_ROWS).min(TASK_ROWS);

    PREPARED.with_borrow_mut(|prepared| {
        let integers = w.layout().integers().filter(|_| activations != Activations::Exact);
        let x_rows = x.rows();
        let prepared = match integers {
            Some(codes) => Input::Integers(codes, prepared.integers(pool, isa, x, codes, w.layout().group)),
            None => Input::Floats(prepared.floats(pool, x)),
        };
        let out = Disjoint::new(out.values_mut());
        pool.run(groups.len() * panel_blocks * row_blocks, |task| {
            // Tasks of one panel block follow each other, so that its second row block finds the weights in the cache.
            let (block, row_block) = (task / row_blocks, task % row_blocks);
            let (group, block) = (&groups[block / panel_blocks], block % panel_blocks);
            let first = group.features.start / LANES + block * task_panels;
            let last = group.features.end.div_ceil(LANES).min(first + task_panels);
            let rows = row_block * rows_of_block..group.rows.len().min((row_block + 1) * rows_of_block);
            if rows.is_empty() {
                return;
            }
            SCRATCH.with_borrow_mut(|scratch| {
                for panel in (first..last).step_by(panels_at_once) {
                    let panels = panel..last.min(panel + panels_at_once);
                    let rows = rows.clone();
                    let task = Task { w, panels, group, rows, x: prepared, x_rows, out, features };
                    isa.run(Run { task, scratch });
                }
            });
        });
    });
}

/// Prepared activations.
#[derive(Clone, Copy)]
enum Input<'a> {
    Integers(&'a Integers, &'a [IntegerRow]),
    Floats(&'a [FloatRow]),
}

/// Up to four panels by up to 192 rows.
struct Task<'a> {
    w: &'a PackedWeight,
    panels: Range<usize>,
    group: &'a Group<'a>,
    rows: Range<usize>,
    x: Input<'a>,
    x_rows: usize,
    out: Disjoint<'a, f32>,
    features: usize,
}

/// A task at work.
struct Run<'a> {
    task: Task<'a>,
    scratch: &'a mut Scratch,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { task, scratch: Scratch { integers, floats, sums } } = self;
        let sums = &mut sums[..task.panels.len()];
        sums.iter_mut().for_each(|sums| sums[..task.rows.len()].fill([0.0; LANES]));
        match task.x {
            Input::Integers(codes, x) => task.integers(simd, codes, x, integers, sums),
            Input::Floats(x) => task.floats(simd, x, &mut integers[0], floats, sums),
        }
        for (panel, sums) in task.panels.clone().zip(&*sums) {
            task.store(simd, panel, &sums[..task.rows.len()]);
        }
    }
}

impl Task<'_> {
    /// The prepared activations of row `i` of the task, in one chunk.
    #[inline(always)]
    fn row<'x, T>(&self, x: &'x [T], i: usize) -> &'x T {
        &x[self.group.rows.input(self.rows.start + i)]
    }

    #[inline(always)]
    fn floats<S: Simd>(
        &self,
        simd: S,
        x: &[FloatRow],
        integers: &mut IntegerChunk,
        weights: &mut [FloatChunk],
        sums: &mut [Sums],
    ) {
        for (chunk, x) in x.chunks_exact(self.x_rows).enumerate() {
            let columns = (self.w.cols() - chunk * CHUNK).min(CHUNK);
            for (panel, weights) in self.panels.clone().zip(&mut *weights) {
                let (tiles, ahead) = self.w.chunk(panel, chunk);
                weights.unpack(simd, self.w.layout(), integers, tiles, ahead);
            }
            let mut from = 0;
            while from < self.rows.len() {
                let rows = next_block(self.rows.len() - from);
                let x = |i: usize| &self.row(x, from + i).0;
                for (weights, sums) in weights.iter().zip(&mut *sums) {
                    multiply_block(simd, 0..columns, &weights.0, x, &mut sums[from..from + rows]);
                }
                from += rows;
            }
        }
    }

    #[inline(always)]
    fn integers<S: Simd>(
        &self,
        simd: S,
        codes: &Integers,
        x: &[IntegerRow],
        weights: &mut [IntegerChunk],
        sums: &mut [Sums],
    ) {
        let layout = self.w.layout();
        for (chunk, x) in x.chunks_exact(self.x_rows).enumerate() {
            let columns = (self.w.cols() - chunk * CHUNK).min(CHUNK);
            let shape = Shape {
                steps: columns.div_ceil(STEP),
                offset: codes.offset != 0,
                bias: layout.has_bias(),
                hold: if codes.wide { 0 } else { S::sums_hold(codes.largest) },
                pairs: layout.group.min(STEP) / 2,
            };
            for (panel, weights) in self.panels.clone().zip(&mut *weights) {
                let (tiles, ahead) = self.w.chunk(panel, chunk);
                weights.unpack(simd, layout, codes, tiles, ahead);
            }
            let mut from = 0;
            while from < self.rows.len() {
                let rows = next_block(self.rows.len() - from);
                let x = |i: usize| self.row(x, from + i);
                for (weights, sums) in weights.iter().zip(&mut *sums) {
                    let sums = &mut sums[from..from + rows];
                    match (codes.wide, layout.group.min(STEP) / 4, shape.hold) {
                        (true, ..) => multiply_rows::<S, Wide>(simd, shape, weights, x, sums),
                        (_, 8, 8..) => multiply_rows::<S, Small<1, 8>>(simd, shape, weights, x, sums),
                        (_, 8, 4..) => multiply_rows::<S, Small<2, 4>>(simd, shape, weights, x, sums),
                        (_, 8, _) => multiply_rows::<S, Small<4, 2>>(simd, shape, weights, x, sums),
                        (.., 4..) => multiply_rows::<S, Small<1, 4>>(simd, shape, weights, x, sums),
                        _ => multiply_rows::<S, Small<2, 2>>(simd, shape, weights, x, sums),
                    }
                }
                from += rows;
            }
        }
    }

    /// Writes a panel's results, without the lanes of other groups or past the last feature.
    #[inline(always)]
    fn store<S: Simd>(&self, simd: S, panel: usize, sums: &[[f32; LANES]]) {
        let first = panel * LANES;
        let features = &self.group.features;
        let lanes = features.start.max(first) - first..features.end.min(first + LANES) - first;
        let scale = self.w.panel_scale(panel);
        for (i, sums) in self.rows.clone().zip(sums) {
            let mut values = *sums;
            if let Some(scale) = scale {
                simd.store(simd.mul(simd.load(sums), simd.load(scale)), &mut values);
            }
            let column = first + lanes.start - features.start;
            let at = self.group.rows.output(i) * self.features + column;
            // SAFETY: a task has its rows and features for itself.
            let out = unsafe { self.out.slice(at, lanes.len()) };
            out.copy_from_slice(&values[lanes.clone()]);
        }
    }
}

/// Rows of the next register block: the largest, unless two of equal size come out even.
#[inline(always)]
fn next_block(rows: usize) -> usize {
    if rows <= BLOCK_ROWS || rows >= 2 * BLOCK_ROWS { rows.min(BLOCK_ROWS) } else { rows.div_ceil(2) }
}

/// `sums[i] += x(i)[columns] · w` for any number of rows: `w` has a vector for each of the columns.
#[inline(always)]
pub fn multiply_float_rows<'x, S: Simd>(
    simd: S,
    columns: Range<usize>,
    w: &[[f32; LANES]],
    x: impl Fn(usize) -> &'x [f32; CHUNK],
    sums: &mut [[f32; LANES]],
) {
    let mut from = 0;
    while from < sums.len() {
        let rows = next_block(sums.len() - from);
        multiply_block(simd, columns.clone(), w, |i| x(from + i), &mut sums[from..from + rows]);
        from += rows;
    }
}

/// `sums[i] += x(i) · w` for up to [`BLOCK_ROWS`] rows.
#[inline(always)]
fn multiply_block<'x, S: Simd>(
    simd: S,
    columns: Range<usize>,
    w: &[[f32; LANES]],
    x: impl Fn(usize) -> &'x [f32; CHUNK],
    sums: &mut [[f32; LANES]],
) {
    match sums.len() {
        1 => multiply_floats::<S, 1>(simd, columns, w, x, sums),
        2 => multiply_floats::<S, 2>(simd, columns, w, x, sums),
        3 => multiply_floats::<S, 3>(simd, columns, w, x, sums),
        4 => multiply_floats::<S, 4>(simd, columns, w, x, sums),
        5 => multiply_floats::<S, 5>(simd, columns, w, x, sums),
        _ => multiply_floats::<S, BLOCK_ROWS>(simd, columns, w, x, sums),
    }
}

/// `sums[i] += x[i] · w` for `ROWS` rows: the accumulators stay in registers.
#[inline(always)]
fn multiply_floats<'x, S: Simd, const ROWS: usize>(
    simd: S,
    columns: Range<usize>,
    w: &[[f32; LANES]],
    x: impl Fn(usize) -> &'x [f32; CHUNK],
    sums: &mut [[f32; LANES]],
) {
    let sums: &mut [[f32; LANES]; ROWS] = sums.try_into().expect("as many sums as rows");
    let x: [&[f32; CHUNK]; ROWS] = std::array::from_fn(x);
    let mut registers = [simd.splat(0.0); ROWS];
    for i in 0..ROWS {
        registers[i] = simd.load(&sums[i]);
    }
    assert!(columns.start <= columns.end && columns.end <= CHUNK, "columns of one chunk");
    for (offset, w) in w[..columns.len()].iter().enumerate() {
        let w = simd.load(w);
        for i in 0..ROWS {
            // SAFETY: the offset is below the number of columns, all of which are in the chunk, as was just checked. The
            // compiler does not see it and would check again for each product.
            let x = unsafe { *x[i].get_unchecked(columns.start + offset) };
            registers[i] = simd.fma(simd.splat(x), w, registers[i]);
        }
    }
    for i in 0..ROWS {
        simd.store(registers[i], &mut sums[i]);
    }
}

/// What [`multiply_integers`] has to do for a layout.
#[derive(Clone, Copy)]
struct Shape {
    steps: usize,
    offset: bool,
    bias: bool,
    /// Quads of small codes whose products a sum holds.
    hold: usize,
    /// Pairs of wide codes of a group.
    pairs: usize,
}

/// The whole products of one group of columns.
trait Group16 {
    /// Groups of 32 columns.
    const GROUPS_OF_STEP: usize;
    /// For each row of `x`, the sum of its products with each of 16 rows of weights.
    fn dot<S: Simd, const ROWS: usize>(
        simd: S,
        shape: Shape,
        group: usize,
        w: &IntegerChunk,
        x: &[&IntegerRow; ROWS],
    ) -> [S::Ints; ROWS];
}

/// The columns of one group, four bytes at a time, of each row.
#[inline(always)]
fn columns<'x, const FOURS: usize, const ROWS: usize>(
    group: usize,
    x: &[&'x IntegerRow; ROWS],
) -> [&'x [[u8; 4]; FOURS]; ROWS] {
    let mut columns = [&[[0; 4]; FOURS]; ROWS];
    for i in 0..ROWS {
        columns[i] = &x[i].codes.as_chunks().0.as_chunks().0[group];
    }
    columns
}

/// Groups of `PARTS · QUADS` quads of small codes, whose sums hold the products of `QUADS` quads.
struct Small<const PARTS: usize, const QUADS: usize>;

impl<const PARTS: usize, const QUADS: usize> Group16 for Small<PARTS, QUADS> {
    const GROUPS_OF_STEP: usize = STEP / 4 / QUADS / PARTS;

    #[inline(always)]
    fn dot<S: Simd, const ROWS: usize>(
        simd: S,
        shape: Shape,
        group: usize,
        w: &IntegerChunk,
        x: &[&IntegerRow; ROWS],
    ) -> [S::Ints; ROWS] {
        let mut totals = [simd.splat_int(0); ROWS];
        for part in 0..PARTS {
            let w: &[Quads; QUADS] = &w.codes.as_chunks().0[group * PARTS + part];
            let x = columns::<QUADS, ROWS>(group * PARTS + part, x);
            let mut sums = [simd.zero_sums(); ROWS];
            // All of them, but the compiler must not see that: it would unroll the loop, go row by row, and run out of
            // registers.
            for quad in 0..shape.hold.min(QUADS) {
                let w = simd.load_bytes(&w[quad]);
                for i in 0..ROWS {
                    sums[i] = simd.dot_bytes(sums[i], w, x[i][quad]);
                }
            }
            for i in 0..ROWS {
                totals[i] = simd.add_ints(totals[i], simd.total(sums[i]));
            }
        }
        totals
    }
}

/// Groups of 16 pairs of wide codes.
struct Wide;

impl Group16 for Wide {
    const GROUPS_OF_STEP: usize = 1;

    #[inline(always)]
    fn dot<S: Simd, const ROWS: usize>(
        simd: S,
        shape: Shape,
        group: usize,
        w: &IntegerChunk,
        x: &[&IntegerRow; ROWS],
    ) -> [S::Ints; ROWS] {
        const PAIRS: usize = STEP / 2;
        let w: &[Quads; PAIRS] = &w.codes.as_chunks().0[group];
        let x = columns::<PAIRS, ROWS>(group, x);
        let mut totals = [simd.splat_int(0); ROWS];
        // All of them, as above.
        for pair in 0..shape.pairs.min(PAIRS) {
            let w = simd.load_bytes(&w[pair]);
            for i in 0..ROWS {
                totals[i] = simd.dot_shorts(totals[i], w, x[i][pair]);
            }
        }
        totals
    }
}

/// `sums[i] += x[i] · w` for up to [`BLOCK_ROWS`] rows.
#[inline(always)]
fn multiply_rows<'x, S: Simd, G: Group16>(
    simd: S,
    shape: Shape,
    w: &IntegerChunk,
    x: impl Fn(usize) -> &'x IntegerRow,
    sums: &mut [[f32; LANES]],
) {
    match sums.len() {
        1 => multiply_integers::<S, G, 1>(simd, shape, w, x, sums),
        2 => multiply_integers::<S, G, 2>(simd, shape, w, x, sums),
        3 => multiply_integers::<S, G, 3>(simd, shape, w, x, sums),
        4 => multiply_integers::<S, G, 4>(simd, shape, w, x, sums),
        5 => multiply_integers::<S, G, 5>(simd, shape, w, x, sums),
        _ => multiply_integers::<S, G, BLOCK_ROWS>(simd, shape, w, x, sums),
    }
}

/// `sums[i] += x[i] · w` for `ROWS` rows, in whole numbers within a group.
#[inline(always)]
fn multiply_integers<'x, S: Simd, G: Group16, const ROWS: usize>(
    simd: S,
    shape: Shape,
    w: &IntegerChunk,
    x: impl Fn(usize) -> &'x IntegerRow,
    sums: &mut [[f32; LANES]],
) {
    let sums: &mut [[f32; LANES]; ROWS] = sums.try_into().expect("as many sums as rows");
    let x: [&IntegerRow; ROWS] = std::array::from_fn(x);
    let mut registers = [simd.splat(0.0); ROWS];
    for i in 0..ROWS {
        registers[i] = simd.load(&sums[i]);
    }
    // Where the compiler sees that no index is past a chunk, it checks none.
    for group in 0..(shape.steps * G::GROUPS_OF_STEP).min(CHUNK / STEP * G::GROUPS_OF_STEP) {
        let mut totals = G::dot(simd, shape, group, w, &x);
        let scale = simd.load(&w.scales[group]);
        for i in 0..ROWS {
            if shape.offset {
                totals[i] = simd.add_ints(totals[i], simd.splat_int(x[i].offsets[group]));
            }
            let scale = simd.mul(scale, simd.splat(x[i].scales[group / G::GROUPS_OF_STEP]));
            registers[i] = simd.fma(simd.to_floats(totals[i]), scale, registers[i]);
        }
        if shape.bias {
            let bias = simd.load(&w.biases[group]);
            for i in 0..ROWS {
                registers[i] = simd.fma(bias, simd.splat(x[i].sums[group]), registers[i]);
            }
        }
    }
    for i in 0..ROWS {
        simd.store(registers[i], &mut sums[i]);
    }
}
