//! Matrix products with packed weights.
//!
//! `out = x · wᵀ` is computed in tasks of some panels (16 output features each) by a block of activation rows. A task walks
//! the input features in chunks, and in each chunk the panels, four at a time: it unpacks their weights into the first-level
//! cache and lets register-blocked microkernels multiply them with all the rows. Every output is the sum of its products in the order of the input features,
//! in one lane, by one thread: it depends neither on the number of threads nor on the other rows of the batch.

mod floats;
mod integers;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::cell::RefCell;
use std::ops::Range;

use consort_compute::portable::{HostBuffer, HostRouting};

use crate::activations::{Activations, GroupedRow, IntegerRow, Prepared};
#[cfg(target_arch = "x86_64")]
use crate::activations::{PairRow, SplitRow};
#[cfg(target_arch = "x86_64")]
use crate::isa::{
    Avx512, Avx512Bf16, PairKernel,
    amx::{TileKernel, Tiles},
};
use crate::isa::{Isa, Kernel, LANES, Simd};
use crate::memory::Disjoint;
use crate::pool::Pool;
use crate::weight::{CHUNK, Codes, FloatChunk, IntegerChunk, Integers, PackedWeight, STEP, Scales};

/// Activation rows of a task: enough to make unpacking cheap, few enough that their chunk stays in the second-level cache.
const TASK_ROWS: usize = 192;
/// The most panels of a task: each chunk of activations is read from memory once for all of them.
const TASK_PANELS: usize = 32;
/// Panels that are unpacked at a time: each chunk of activations is read from the second-level cache once for all of them.
const PANELS: usize = 4;
/// The fewest tasks of each thread, if the product is large enough: more with few rows, so that threads finish together.
const TASKS_OF_THREAD: usize = 4;
const TASKS_OF_THREAD_WITH_FEW_ROWS: usize = 8;
/// Up to this many rows a product waits for memory.
const FEW_ROWS: usize = 8;
/// Rows that a task is cut by are multiples of this, as register blocks are.
const BLOCK_ROWS: usize = 12;
/// Rows that are copied to follow each other in memory: those of a tile.
const COPIED_ROWS: usize = 16;

thread_local! {
    /// Memory for prepared activations, of each thread that calls products.
    static PREPARED: RefCell<Prepared> = RefCell::default();
    /// Memory of each thread that computes them.
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        integers: [const { IntegerChunk::ZERO }; PANELS],
        floats: [const { FloatChunk::ZERO }; PANELS],
        rows: [GroupedRow::ZERO; COPIED_ROWS],
        sums: vec![[[[0.0; LANES]; PANELS]; TASK_ROWS]; TASK_PANELS / PANELS],
        #[cfg(target_arch = "x86_64")]
        pairs: pairs::Scratch::ZERO,
        #[cfg(target_arch = "x86_64")]
        tiles: tiles::Scratch::ZERO,
    }));
}

/// What a task works in.
#[repr(C, align(64))]
struct Scratch {
    integers: [IntegerChunk; PANELS],
    floats: [FloatChunk; PANELS],
    /// Rows that don't follow each other in memory are copied here.
    rows: [GroupedRow; COPIED_ROWS],
    /// Of each few panels of a task.
    sums: Vec<Sums>,
    #[cfg(target_arch = "x86_64")]
    pairs: pairs::Scratch,
    #[cfg(target_arch = "x86_64")]
    tiles: tiles::Scratch,
}

/// Sums in progress: for each row, one vector of 16 output features of each of a few panels.
type Sums = [[[f32; LANES]; PANELS]; TASK_ROWS];

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
    let activations = activations.with(w.layout(), isa);
    let integers = w.layout().integers().filter(|_| activations == Activations::Int8);
    let round = activations == Activations::Bf16;
    let bf16 = isa.bf16().filter(|_| round);
    let few = most_rows <= FEW_ROWS;
    // Few rows leave most of a tile empty. Sums of whole numbers are the same to the bit in vectors, which are quicker then.
    let amx = isa.amx().filter(|_| !few || integers.is_none());
    // With few rows, one stream of memory at a time; but products of floats are chains that need company.
    let panels_at_once = match few {
        false => TASK_PANELS,
        true if amx.is_some() => {
            if w.layout().scales == Scales::One {
                PANELS
            } else {
                1
            }
        }
        true if bf16.is_some() && w.layout().codes == Codes::BF16 => 1,
        true if integers.is_none() => 2,
        true => 1,
    };
    let block_rows = if amx.is_some() { COPIED_ROWS } else { BLOCK_ROWS };
    let row_blocks = most_rows.div_ceil(TASK_ROWS);
    let rows_of_block = most_rows.div_ceil(row_blocks).next_multiple_of(block_rows).min(TASK_ROWS);
    let tasks = pool.threads() * if few { TASKS_OF_THREAD_WITH_FEW_ROWS } else { TASKS_OF_THREAD };
    let task_panels = (panels_of_group * groups.len() * row_blocks / tasks).clamp(1, TASK_PANELS);
    let task_panels = task_panels.next_multiple_of(panels_at_once.min(PANELS));
    let panel_blocks = panels_of_group.div_ceil(task_panels);

    PREPARED.with_borrow_mut(|prepared| {
        let (x_rows, weight_group) = (x.rows(), w.layout().group);
        let prepared = match (integers, bf16, amx) {
            (Some(codes), ..) => Input::Integers(codes, prepared.integers(pool, isa, x, codes, weight_group)),
            (None, None, None) => {
                let halves = w.layout().integers().is_some() && weight_group < STEP;
                Input::Floats(prepared.floats(pool, isa, x, round, halves))
            }
            #[cfg(target_arch = "x86_64")]
            (None, Some(_), _) => Input::Pairs(prepared.pairs(pool, isa, x)),
            #[cfg(target_arch = "x86_64")]
            (None, None, Some(amx)) => Input::Split(prepared.split(pool, amx, x, weight_group, round)),
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
                    match (bf16, amx) {
                        (None, None) => isa.run(Run { task, scratch }),
                        #[cfg(target_arch = "x86_64")]
                        (Some(bf16), _) => bf16.run(Run { task, scratch }),
                        #[cfg(target_arch = "x86_64")]
                        (None, Some(amx)) => amx.run(Run { task, scratch }),
                    }
                }
            });
        });
    });
}

/// Prepared activations.
#[derive(Clone, Copy)]
enum Input<'a> {
    Integers(&'a Integers, &'a [IntegerRow]),
    Floats(&'a [GroupedRow]),
    #[cfg(target_arch = "x86_64")]
    Pairs(&'a [PairRow]),
    #[cfg(target_arch = "x86_64")]
    Split(&'a [SplitRow]),
}

/// Up to 32 panels by up to 192 rows.
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
        let Self { task, scratch: Scratch { integers, floats, rows, sums, .. } } = self;
        task.clear(sums);
        if let Input::Integers(codes, x) = task.x
            && task.rows.len() <= FEW_ROWS
        {
            task.few_integers(simd, codes, x, &mut sums[0]);
            return task.store(simd, sums);
        }
        for chunk in 0..task.w.cols().div_ceil(CHUNK) {
            for (piece, sums) in task.pieces(chunk).zip(&mut *sums) {
                match task.x {
                    Input::Integers(codes, x) => {
                        task.integers(simd, piece, codes, task.chunk(x, chunk), integers, sums)
                    }
                    Input::Floats(x) => task.floats(simd, piece, task.chunk(x, chunk), integers, floats, rows, sums),
                    #[cfg(target_arch = "x86_64")]
                    Input::Pairs(_) | Input::Split(_) => unreachable!("vectors take floats"),
                }
            }
        }
        task.store(simd, sums);
    }
}

#[cfg(target_arch = "x86_64")]
impl PairKernel for Run<'_> {
    #[inline(always)]
    fn run(self, dot: Avx512Bf16) {
        let Self { task, scratch: Scratch { sums, pairs: scratch, .. } } = self;
        let Input::Pairs(x) = task.x else { unreachable!("pairs were prepared") };
        task.clear(sums);
        task.pairs(dot, x, scratch, sums);
        task.store(dot.vectors(), sums);
    }
}

#[cfg(target_arch = "x86_64")]
impl TileKernel for Run<'_> {
    #[inline(always)]
    fn run(self, tiles: &mut Tiles, simd: Avx512) {
        let Self { task, scratch: Scratch { integers, sums, tiles: scratch, .. } } = self;
        task.clear(sums);
        for chunk in 0..task.w.cols().div_ceil(CHUNK) {
            for (piece, sums) in task.pieces(chunk).zip(&mut *sums) {
                match task.x {
                    Input::Integers(codes, x) => {
                        task.tile_integers(tiles, simd, piece, codes, x, integers, scratch, sums);
                    }
                    Input::Split(x) => {
                        task.tile_floats(tiles, simd, piece, x, integers, scratch, sums);
                    }
                    Input::Floats(_) | Input::Pairs(_) => unreachable!("tiles take split activations"),
                }
            }
        }
        task.store(simd, sums);
    }
}

/// One chunk of the input features of up to [`PANELS`] panels.
#[derive(Clone)]
struct Piece {
    chunk: usize,
    columns: usize,
    panels: Range<usize>,
}

#[cfg(target_arch = "x86_64")]
impl Piece {
    /// What to ask memory for while weights are unpacked, and what while they are multiplied. Only a panel that is alone has
    /// few rows and waits for memory: the more evenly its requests are spread, the less it does.
    #[inline(always)]
    fn now_and_later<'a>(&self, ahead: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        ahead.split_at(if self.panels.len() == 1 { ahead.len() / 2 } else { ahead.len() })
    }
}

impl Task<'_> {
    /// A chunk, a few panels at a time.
    #[inline(always)]
    fn pieces(&self, chunk: usize) -> impl Iterator<Item = Piece> {
        let columns = (self.w.cols() - chunk * CHUNK).min(CHUNK);
        let end = self.panels.end;
        self.panels.clone().step_by(PANELS).map(move |first| Piece {
            chunk,
            columns,
            panels: first..end.min(first + PANELS),
        })
    }

    /// The prepared activations of one chunk.
    #[inline(always)]
    fn chunk<'x, T>(&self, x: &'x [T], chunk: usize) -> &'x [T] {
        &x[chunk * self.x_rows..][..self.x_rows]
    }

    /// The prepared activations of row `i` of the task, in one chunk.
    #[inline(always)]
    fn row<'x, T>(&self, x: &'x [T], i: usize) -> &'x T {
        &x[self.group.rows.input(self.rows.start + i)]
    }

    /// The prepared activations of `rows` rows from row `from` of the task on, one after the other in one chunk, if they lie so.
    #[inline(always)]
    fn neighbours<'x, T>(&self, x: &'x [T], from: usize, rows: usize) -> Option<&'x [T]> {
        let begin = self.rows.start + from;
        let first = self.group.rows.input(begin);
        (1..rows).all(|i| self.group.rows.input(begin + i) == first + i).then(|| &x[first..first + rows])
    }

    /// The same, or copies.
    #[inline(always)]
    fn gather<'x, T: Copy>(&self, x: &'x [T], from: usize, rows: usize, copies: &'x mut [T; COPIED_ROWS]) -> &'x [T] {
        if let Some(x) = self.neighbours(x, from, rows) {
            return x;
        }
        for (i, copy) in copies[..rows].iter_mut().enumerate() {
            *copy = *self.row(x, from + i);
        }
        &copies[..rows]
    }

    /// No products yet, for all rows of register blocks.
    #[inline(always)]
    fn clear(&self, sums: &mut [Sums]) {
        let (sums, rows) =
            (&mut sums[..self.panels.len().div_ceil(PANELS)], self.rows.len().next_multiple_of(FEW_ROWS));
        sums.iter_mut().for_each(|sums| sums[..rows].fill([[0.0; LANES]; PANELS]));
    }

    /// Writes the results, row by row, without the lanes of other groups or past the last feature.
    #[inline(always)]
    fn store<S: Simd>(&self, simd: S, sums: &[Sums]) {
        let features = &self.group.features;
        for (i, row) in self.rows.clone().enumerate() {
            let row_start = self.group.rows.output(row) * self.features;
            for (panel, sums) in self.panels.clone().zip(sums.iter().flat_map(|sums| &sums[i])) {
                let mut sums = simd.load(sums);
                if let Some(scale) = self.w.panel_scale(panel) {
                    sums = simd.mul(sums, simd.load(scale));
                }
                let first = panel * LANES;
                let lanes = features.start.max(first) - first..features.end.min(first + LANES) - first;
                // SAFETY: a task has its rows and features for itself.
                let out = unsafe { self.out.slice(row_start + first + lanes.start - features.start, lanes.len()) };
                if let Ok(out) = out.try_into() {
                    simd.store(sums, out);
                } else {
                    let mut values = [0.0; LANES];
                    simd.store(sums, &mut values);
                    out.copy_from_slice(&values[lanes]);
                }
            }
        }
    }
}
