//! Products of f32.
//!
//! Many rows multiply a chunk that was unpacked once for all of them. A few take the weights from memory themselves: each vector
//! of weights goes from the load to the sums in registers. Both add the products of a sum in the order of the columns, so they
//! give the same bits. Whole numbers are summed up group by group before they are scaled, and a group's bias is multiplied with
//! the sum of its activations: that takes a few operations for each group instead of two for each weight.
#![expect(clippy::needless_range_loop, reason = "indices name registers, and compilers unroll them")]

use super::{COPIED_ROWS, FEW_ROWS, PANELS, Piece, Sums, Task};
use crate::activations::GroupedRow;
use crate::isa::{Kernel, LANES, Simd};
use crate::microkernel::{self, Vectors, multiply};
use crate::weight::{
    AHEAD_BYTES, CHUNK, Codes, Factors, FloatChunk, GROUPS, IntegerChunk, Integers, Layout, LoadNumber, LoadQuad,
    Number, QUADS, STEP, Scales, columns_of_quad, numbers, numbers::Columns, unpack_step,
};

/// Columns between two requests for memory.
const BURST: usize = 8;

impl Task<'_> {
    /// Products of f32 activations with weights of any format.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "what a task is made of, borrowed apart")]
    pub(super) fn floats<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        x: &[GroupedRow],
        integers: &mut [IntegerChunk; PANELS],
        weights: &mut [FloatChunk; PANELS],
        copies: &mut [GroupedRow; COPIED_ROWS],
        sums: &mut Sums,
    ) {
        if self.rows.len() <= FEW_ROWS && piece.columns.is_multiple_of(STEP) {
            return self.few_floats(simd, piece, x, integers, sums);
        }
        let layout = self.w.layout();
        for ((panel, weights), integers) in piece.panels.clone().zip(&mut *weights).zip(&mut *integers) {
            let (tiles, ahead) = self.w.chunk(panel, piece.chunk);
            match &layout.codes {
                Codes::Integers(codes) => weights.unpack_codes(simd, layout, codes, integers, tiles, ahead),
                _ => weights.unpack(simd, layout, integers, tiles, ahead),
            }
        }
        let w = Vectors { lanes: FloatChunk::lanes(weights), stride: CHUNK, step: 1, count: piece.panels.len() };
        let all = self.rows.len();
        let rows = if self.neighbours(x, 0, all).is_some() { all } else { COPIED_ROWS };
        for from in (0..all).step_by(rows) {
            let x = self.gather(x, from, rows.min(all - from), copies);
            if layout.integers().is_some() {
                let groups = Groups {
                    columns: layout.group.min(STEP),
                    count: piece.columns.div_ceil(layout.group.min(STEP)),
                    bias: layout.has_bias(),
                };
                groups.multiply(simd, x, weights, integers, piece.panels.len(), &mut sums[from..]);
                continue;
            }
            let mut sums = microkernel::Sums { lanes: sums[from..].as_flattened_mut(), stride: PANELS };
            multiply(simd, GroupedRow::values(x), 0..piece.columns, w, &mut sums, &[]);
        }
    }

    /// Few rows: two panels at a time, so that sums wait less for each other.
    #[inline(always)]
    fn few_floats<S: Simd>(
        &self,
        simd: S,
        piece: Piece,
        x: &[GroupedRow],
        integers: &mut [IntegerChunk; PANELS],
        sums: &mut Sums,
    ) {
        let layout = self.w.layout();
        let count = piece.panels.len();
        let mut tiles = [&[][..]; PANELS];
        for (tiles, panel) in tiles.iter_mut().zip(piece.panels.clone()) {
            *tiles = self.w.chunk(panel, piece.chunk).0;
        }
        let mut from = 0;
        while from < self.rows.len() {
            let rows = match self.rows.len() - from {
                8.. => 8,
                4.. => 4,
                left => left.min(2),
            };
            let block = Block { layout, tiles: &tiles, integers, count, sums: &mut sums[from..from + rows] };
            let x = |i: usize| self.row(x, from + i);
            match rows {
                8 => simd.call(Few::<8, 1>::new(block, x)),
                4 => simd.call(Few::<4, 2>::new(block, x)),
                2 => simd.call(Few::<2, 2>::new(block, x)),
                _ => simd.call(Few::<1, 2>::new(block, x)),
            }
            from += rows;
        }
    }
}

/// A chunk of some panels.
struct Block<'a> {
    layout: &'a Layout,
    tiles: &'a [&'a [u8]; PANELS],
    /// Memory for the scales of integer codes.
    integers: &'a mut [IntegerChunk; PANELS],
    /// How many panels.
    count: usize,
    /// Of some rows.
    sums: &'a mut [[[f32; LANES]; PANELS]],
}

/// Multiplies `COUNT` panels at a time with `ROWS` rows. The last panel takes all places that are left.
struct Few<'a, const ROWS: usize, const COUNT: usize> {
    block: Block<'a>,
    x: [&'a GroupedRow; ROWS],
}

impl<'a, const ROWS: usize, const COUNT: usize> Few<'a, ROWS, COUNT> {
    #[inline(always)]
    fn new(block: Block<'a>, x: impl Fn(usize) -> &'a GroupedRow) -> Self {
        Self { block, x: std::array::from_fn(x) }
    }
}

impl<const ROWS: usize, const COUNT: usize> Kernel for Few<'_, ROWS, COUNT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { block: Block { layout, tiles, integers, count, sums }, x } = self;
        for first in (0..count).step_by(COUNT) {
            let place = |p: usize| (first + p).min(count - 1);
            let panels = Panels { layout, tiles: std::array::from_fn(|p| tiles[place(p)]) };
            let mut registers = [[simd.splat(0.0); COUNT]; ROWS];
            for i in 0..ROWS {
                for p in 0..COUNT {
                    registers[i][p] = simd.load(&sums[i][place(p)]);
                }
            }
            match &layout.codes {
                Codes::F32 => panels.columns::<S, Columns<numbers::F32>, ROWS>(simd, x, &mut registers),
                Codes::F16 => panels.columns::<S, Columns<numbers::F16>, ROWS>(simd, x, &mut registers),
                Codes::BF16 => panels.columns::<S, numbers::Pairs, ROWS>(simd, x, &mut registers),
                Codes::E4M3 => panels.columns::<S, numbers::PairsOfE4M3, ROWS>(simd, x, &mut registers),
                Codes::Integers(codes) if layout.group < STEP => {
                    panels.steps::<S, { QUADS / 2 }, ROWS>(simd, codes, integers, x, &mut registers);
                }
                Codes::Integers(codes) => panels.steps::<S, QUADS, ROWS>(simd, codes, integers, x, &mut registers),
            }
            for i in 0..ROWS {
                for p in 0..COUNT {
                    simd.store(registers[i][p], &mut sums[i][place(p)]);
                }
            }
        }
    }
}

/// A chunk of `COUNT` panels.
struct Panels<'a, const COUNT: usize> {
    layout: &'a Layout,
    tiles: [&'a [u8]; COUNT],
}

impl<const COUNT: usize> Panels<'_, COUNT> {
    /// Numbers, column by column.
    #[inline(always)]
    fn columns<S: Simd, Q: LoadQuad, const ROWS: usize>(
        &self,
        simd: S,
        x: [&GroupedRow; ROWS],
        sums: &mut [[S::Floats; COUNT]; ROWS],
    ) {
        let Layout { tile_bytes, scale_bytes, block, scales, .. } = *self.layout;
        let burst_bytes = BURST / 4 * Q::BYTES;
        let (mut at, mut column) = (0, 0);
        while at < self.tiles[0].len() {
            let mut scale = [simd.splat(1.0); COUNT];
            for p in 0..COUNT {
                let head = &self.tiles[p][at..at + tile_bytes];
                scale[p] = match scales {
                    Scales::Plain { number: Number::E8M0, .. } => numbers::E8M0::load(simd, head),
                    Scales::Plain { .. } => numbers::F32::load(simd, head),
                    Scales::One | Scales::Nested { .. } => scale[p],
                };
            }
            at += scale_bytes;
            for _ in 0..block / BURST {
                let mut columns = [&[][..]; COUNT];
                for p in 0..COUNT {
                    columns[p] = &self.tiles[p][at..at + burst_bytes];
                    for line in columns[p].as_chunks().0 {
                        simd.prefetch_after(line, AHEAD_BYTES);
                    }
                }
                at += burst_bytes;
                for quad in 0..BURST / 4 {
                    let mut quads = [[simd.splat(0.0); 4]; COUNT];
                    for p in 0..COUNT {
                        quads[p] = Q::load(simd, &columns[p][quad * Q::BYTES..(quad + 1) * Q::BYTES]);
                    }
                    for k in 0..4 {
                        let mut lanes = [simd.splat(0.0); COUNT];
                        for p in 0..COUNT {
                            lanes[p] = if scale_bytes > 0 { simd.mul(quads[p][k], scale[p]) } else { quads[p][k] };
                        }
                        add(simd, x, column + 4 * quad + k, lanes, sums);
                    }
                }
                column += BURST;
            }
        }
    }

    /// Integer codes in groups of `GROUP` quads, step by step.
    #[inline(always)]
    fn steps<S: Simd, const GROUP: usize, const ROWS: usize>(
        &self,
        simd: S,
        codes: &Integers,
        memory: &mut [IntegerChunk; PANELS],
        x: [&GroupedRow; ROWS],
        sums: &mut [[S::Floats; COUNT]; ROWS],
    ) {
        let Layout { tile_bytes, scale_bytes, block, .. } = *self.layout;
        let step_bytes = codes.step_bytes();
        let nibbles = S::NIBBLES && codes.bits == 4;
        let mut table = [0.0; LANES];
        for (code, value) in table.iter_mut().enumerate() {
            let code = codes.table.map_or(code as i16, |table| table[code].into());
            *value = f32::from(code - codes.offset);
        }
        let table = simd.load(&table);
        let (mut at, mut place) = (0, 0);
        while at < self.tiles[0].len() {
            for p in 0..COUNT {
                let tile = &self.tiles[p][at..at + tile_bytes];
                memory[p].factors.unpack_tile(simd, self.layout, tile, QUADS / GROUP * place);
                for line in tile[..scale_bytes].as_chunks().0 {
                    simd.prefetch_after(line, AHEAD_BYTES);
                }
            }
            at += scale_bytes;
            for _ in 0..block / STEP {
                for p in 0..COUNT {
                    let step = &self.tiles[p][at..at + step_bytes];
                    for line in step.as_chunks().0 {
                        simd.prefetch_after(line, AHEAD_BYTES);
                    }
                    if !nibbles {
                        let quads = unpack_step(simd, codes, step);
                        for quad in 0..QUADS {
                            simd.store_bytes(quads[quad], &mut memory[p].codes[quad]);
                        }
                    }
                }
                for half in 0..QUADS / GROUP {
                    let mut products = [[simd.splat(0.0); COUNT]; ROWS];
                    for pair in GROUP / 2 * half..GROUP / 2 * (half + 1) {
                        let mut quads = [[[simd.splat(0.0); 4]; 2]; COUNT];
                        for p in 0..COUNT {
                            quads[p] = if nibbles {
                                let line = &self.tiles[p][at..at + step_bytes].as_chunks().0[pair];
                                quads_of_nibbles(simd, table, simd.load_bytes(line))
                            } else {
                                let quad = [
                                    simd.load_bytes(&memory[p].codes[2 * pair]),
                                    simd.load_bytes(&memory[p].codes[2 * pair + 1]),
                                ];
                                [
                                    columns_of_quad(simd, quad[0], codes.offset),
                                    columns_of_quad(simd, quad[1], codes.offset),
                                ]
                            };
                        }
                        for quad in 0..2 {
                            for k in 0..4 {
                                let mut lanes = [simd.splat(0.0); COUNT];
                                for p in 0..COUNT {
                                    lanes[p] = quads[p][quad][k];
                                }
                                add(simd, x, STEP * place + 4 * (2 * pair + quad) + k, lanes, &mut products);
                            }
                        }
                    }
                    let group = QUADS / GROUP * place + half;
                    for p in 0..COUNT {
                        let scaling = Scaling::new(simd, &memory[p].factors, group, self.layout.has_bias());
                        for i in 0..ROWS {
                            sums[i][p] = scaling.add(simd, sums[i][p], products[i][p], x[i], group);
                        }
                    }
                }
                at += step_bytes;
                place = (place + 1) % (CHUNK / STEP);
            }
        }
    }
}

/// The eight columns of a vector of nibbles.
#[inline(always)]
fn quads_of_nibbles<S: Simd>(simd: S, table: S::Floats, nibbles: S::Bytes) -> [[S::Floats; 4]; 2] {
    [
        [
            simd.lookup_nibble::<0>(table, nibbles),
            simd.lookup_nibble::<2>(table, nibbles),
            simd.lookup_nibble::<4>(table, nibbles),
            simd.lookup_nibble::<6>(table, nibbles),
        ],
        [
            simd.lookup_nibble::<1>(table, nibbles),
            simd.lookup_nibble::<3>(table, nibbles),
            simd.lookup_nibble::<5>(table, nibbles),
            simd.lookup_nibble::<7>(table, nibbles),
        ],
    ]
}

/// What the products of a group are multiplied by.
#[derive(Clone, Copy)]
struct Scaling<S: Simd> {
    scale: S::Floats,
    bias: S::Floats,
    biased: bool,
}

impl<S: Simd> Scaling<S> {
    /// Of group `group` of a chunk.
    #[inline(always)]
    fn new(simd: S, from: &Factors, group: usize, biased: bool) -> Self {
        let group = group % GROUPS;
        Self { scale: simd.load(&from.scales[group]), bias: simd.load(&from.biases[group]), biased }
    }

    /// Adds the products of a row with the group's codes.
    #[inline(always)]
    fn add(&self, simd: S, sum: S::Floats, products: S::Floats, x: &GroupedRow, group: usize) -> S::Floats {
        let sum = simd.fma(products, self.scale, sum);
        if self.biased { simd.fma(self.bias, simd.splat(x.0[CHUNK + group % GROUPS]), sum) } else { sum }
    }
}

/// Groups of unpacked whole numbers.
#[derive(Clone, Copy)]
struct Groups {
    /// Columns of each.
    columns: usize,
    count: usize,
    bias: bool,
}

impl Groups {
    /// Adds the products of `x` with `count` panels.
    #[inline(always)]
    fn multiply<S: Simd>(
        self,
        simd: S,
        x: &[GroupedRow],
        weights: &[FloatChunk; PANELS],
        integers: &[IntegerChunk; PANELS],
        count: usize,
        sums: &mut [[[f32; LANES]; PANELS]],
    ) {
        let wide = S::REGISTERS >= 32;
        for first in (0..count).step_by(if wide { 2 } else { 1 }) {
            // The last panel takes both places if it is alone.
            let places = [first, (first + 1).min(count - 1)];
            let mut row = 0;
            while row < x.len() {
                let block =
                    GroupBlock { groups: self, x: &x[row..], weights, integers, places, sums: &mut sums[row..] };
                row += match (wide, x.len() - row) {
                    (true, 12..) => block.multiply::<S, 12, 2>(simd),
                    (true, 8..) => block.multiply::<S, 8, 2>(simd),
                    (true, 4..) => block.multiply::<S, 4, 2>(simd),
                    (true, 2..) => block.multiply::<S, 2, 2>(simd),
                    (true, _) => block.multiply::<S, 1, 2>(simd),
                    (false, 6..) => block.multiply::<S, 6, 1>(simd),
                    (false, 4..) => block.multiply::<S, 4, 1>(simd),
                    (false, 2..) => block.multiply::<S, 2, 1>(simd),
                    (false, _) => block.multiply::<S, 1, 1>(simd),
                };
            }
        }
    }
}

/// Some rows and panels.
struct GroupBlock<'a> {
    groups: Groups,
    /// The first of its rows, and those after it.
    x: &'a [GroupedRow],
    weights: &'a [FloatChunk; PANELS],
    integers: &'a [IntegerChunk; PANELS],
    /// Its panels.
    places: [usize; 2],
    sums: &'a mut [[[f32; LANES]; PANELS]],
}

impl GroupBlock<'_> {
    /// Does so many rows and panels, and returns the number of rows.
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize, const COUNT: usize>(self, simd: S) -> usize {
        let Self { groups: Groups { columns, count, bias }, places, .. } = self;
        let x: &[GroupedRow; ROWS] = self.x.first_chunk().expect("as many rows");
        let sums: &mut [[[f32; LANES]; PANELS]; ROWS] = self.sums.first_chunk_mut().expect("as many sums");
        assert!(columns * count <= CHUNK, "columns of a chunk");
        for group in 0..count {
            let mut products = [[simd.splat(0.0); COUNT]; ROWS];
            for k in columns * group..columns * (group + 1) {
                let mut lanes = [simd.splat(0.0); COUNT];
                for p in 0..COUNT {
                    // SAFETY: as was just checked.
                    lanes[p] = simd.load(unsafe { self.weights[places[p] % PANELS].0.get_unchecked(k) });
                }
                for i in 0..ROWS {
                    // SAFETY: as was just checked.
                    let x = simd.splat(unsafe { *x[i].0.get_unchecked(k) });
                    for p in 0..COUNT {
                        products[i][p] = simd.fma(x, lanes[p], products[i][p]);
                    }
                }
            }
            for p in 0..COUNT {
                let scaling = Scaling::new(simd, &self.integers[places[p] % PANELS].factors, group, bias);
                for i in 0..ROWS {
                    let sum = simd.load(&sums[i][places[p] % PANELS]);
                    products[i][p] = scaling.add(simd, sum, products[i][p], &x[i], group);
                }
            }
            // Only now, because places may be the same.
            for i in 0..ROWS {
                for p in 0..COUNT {
                    simd.store(products[i][p], &mut sums[i][places[p] % PANELS]);
                }
            }
        }
        ROWS
    }
}

/// Adds the products of one column.
#[inline(always)]
fn add<S: Simd, const ROWS: usize, const COUNT: usize>(
    simd: S,
    x: [&GroupedRow; ROWS],
    column: usize,
    lanes: [S::Floats; COUNT],
    sums: &mut [[S::Floats; COUNT]; ROWS],
) {
    for i in 0..ROWS {
        let x = simd.splat(x[i].0[column % CHUNK]);
        for p in 0..COUNT {
            sums[i][p] = simd.fma(x, lanes[p], sums[i][p]);
        }
    }
}
