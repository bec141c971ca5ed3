//! The backend: which kernel each operation of a forward pass runs.

use consort_compute::portable::{self, HostBuffer, HostCache, HostRouting};
use consort_compute::{
    Activation, AttentionSpec, Backend, ComputeError, DeltaSpec, Format, KvSpec, Matrix, NormGain, RopeSpec, RouteSpec,
    Run,
};

use crate::activations::Activations;
use crate::affinity::allowed_cores;
use crate::isa::{Isa, IsaError};
use crate::memory::advise_huge_pages;
use crate::pool::Pool;
use crate::product::{self, Machine};
use crate::weight::{LAYOUT_VERSION, PackedWeight};
use crate::{attention, cache, conv, delta, rows};

/// How a [`Cpu`] is set up.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Threads; `None`: one for each core.
    pub threads: Option<usize>,
    /// The cores to run on, in order, one for each thread: ranks that share a machine get disjoint ones. `None`: the first
    /// ones that the process may use.
    pub cores: Option<Vec<usize>>,
    /// Let the system move threads between cores.
    pub unpinned: bool,
    /// How activations enter products.
    pub activations: Activations,
    /// The instruction set; `None`: the best one, or the one that `CONSORT_ISA` names.
    pub isa: Option<Isa>,
}

/// What keeps a [`Cpu`] from being set up.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// A forced instruction set is unknown or missing.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// More threads than cores to pin them to.
    #[error("{threads} threads cannot be pinned to {cores} cores; ask for fewer threads or name more cores")]
    Cores {
        /// Asked for.
        threads: usize,
        /// There are.
        cores: usize,
    },
    /// A core that this process may not use.
    #[error("core {core} is not one that this process may use ({allowed:?})")]
    Core {
        /// Asked for.
        core: usize,
        /// Those that it may.
        allowed: Vec<usize>,
    },
    /// The system refused a thread.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// Asked for.
        threads: usize,
        /// Why.
        source: std::io::Error,
    },
}

/// The CPU backend. Operations run on the calling thread and the pool's workers; the calling thread is pinned when it first
/// runs one.
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    activations: Activations,
}

impl Cpu {
    /// Starts the threads and chooses the instruction set.
    ///
    /// # Errors
    /// When the options ask for what the machine lacks.
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        let isa = match options.isa {
            Some(isa) => isa,
            None => Isa::from_environment()?,
        };
        let allowed = allowed_cores();
        let cores = options.cores.unwrap_or_else(|| allowed.to_vec());
        if let Some(&core) = cores.iter().find(|core| !allowed.contains(core)) {
            return Err(CpuError::Core { core, allowed: allowed.to_vec() });
        }
        let threads = options.threads.unwrap_or(cores.len()).max(1);
        if threads > cores.len() && !options.unpinned {
            return Err(CpuError::Cores { threads, cores: cores.len() });
        }
        let cores = if options.unpinned { Vec::new() } else { cores };
        let pool = Pool::new(threads, cores).map_err(|source| CpuError::Threads { threads, source })?;
        Ok(Self { pool, isa, activations: options.activations })
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn machine(&self) -> Machine<'_> {
        Machine { pool: &self.pool, isa: self.isa, activations: self.activations }
    }
}

impl Backend for Cpu {
    type Buffer = HostBuffer;
    type Weight = PackedWeight;
    type Cache = HostCache;
    type Routing = HostRouting;

    fn buffer(&self, capacity: usize) -> HostBuffer {
        HostBuffer::with_capacity(capacity)
    }

    fn upload(&self, out: &mut HostBuffer, rows: usize, cols: usize, values: &[f32]) {
        out.upload(rows, cols, values);
    }

    fn shape(&self, x: &HostBuffer) -> (usize, usize) {
        x.shape()
    }

    fn reshape(&self, x: &mut HostBuffer, rows: usize, cols: usize) {
        x.reshape(rows, cols);
    }

    fn with_host<R>(&self, x: &mut HostBuffer, f: impl FnOnce(&mut [f32]) -> R) -> Result<R, ComputeError> {
        Ok(f(x.values_mut()))
    }

    fn empty_weight(&self, format: Format, rows: usize, cols: usize) -> PackedWeight {
        PackedWeight::empty(format, rows, cols)
    }

    fn fill_weight(&self, w: &mut PackedWeight, first_row: usize, piece: &Matrix<'_>) {
        w.fill(first_row, piece, &self.pool);
    }

    fn layout_name(&self) -> Option<String> {
        Some(format!("cpu layout {LAYOUT_VERSION}, {}", self.isa))
    }

    fn weight_memory<'w>(&self, w: &'w mut PackedWeight, row_scale: bool) -> Option<[&'w mut [u8]; 2]> {
        Some(w.memory(row_scale))
    }

    fn weight_bytes(&self, w: &PackedWeight) -> usize {
        w.bytes()
    }

    fn embed(&self, out: &mut HostBuffer, w: &PackedWeight, tokens: &[u32]) {
        product::embed(self.machine(), out, w, tokens);
    }

    fn matmul(&self, out: &mut HostBuffer, x: &HostBuffer, w: &PackedWeight) {
        product::matmul(self.machine(), out, x, w);
    }

    fn rms_norm(
        &self,
        out: &mut HostBuffer,
        x: &HostBuffer,
        width: usize,
        gain: NormGain<'_, HostBuffer>,
        epsilon: f32,
    ) {
        rows::rms_norm(self.machine(), out, x, width, &gain, epsilon);
    }

    fn rms_norm_in_place(&self, x: &mut HostBuffer, width: usize, gain: NormGain<'_, HostBuffer>, epsilon: f32) {
        rows::rms_norm_in_place(self.machine(), x, width, &gain, epsilon);
    }

    fn scale_columns(&self, x: &mut HostBuffer, gain: &HostBuffer) {
        portable::norm::scale_columns(x, gain);
    }

    fn sum_squares(&self, out: &mut HostBuffer, x: &HostBuffer) {
        portable::norm::sum_squares(out, x);
    }

    fn scale_by_squares(&self, x: &mut HostBuffer, squares: &HostBuffer, width: usize, epsilon: f32) {
        portable::norm::scale_by_squares(x, squares, width, epsilon);
    }

    fn add(&self, x: &mut HostBuffer, y: &HostBuffer) {
        rows::add(self.machine(), x, y);
    }

    fn add_row(&self, x: &mut HostBuffer, row: &HostBuffer) {
        rows::add_row(self.machine(), x, row);
    }

    fn blend(&self, x: &mut HostBuffer, alpha: &HostBuffer, y: &HostBuffer, beta: &HostBuffer) {
        portable::rows::blend(x, alpha, y, beta);
    }

    fn scale(&self, x: &mut HostBuffer, factor: f32) {
        portable::rows::scale(x, factor);
    }

    fn scale_rows(&self, x: &mut HostBuffer, factors: &[f32]) {
        portable::rows::scale_rows(x, factors);
    }

    fn softcap(&self, x: &mut HostBuffer, cap: f32) {
        rows::softcap(self.machine(), x, cap);
    }

    fn sigmoid_gate(&self, x: &mut HostBuffer, gate: &HostBuffer) {
        rows::sigmoid_gate(self.machine(), x, gate);
    }

    fn gated(&self, gate: &mut HostBuffer, up: &HostBuffer, activation: Activation) {
        rows::gated(self.machine(), gate, up, activation);
    }

    fn select_rows(&self, out: &mut HostBuffer, x: &HostBuffer, rows: &[u32]) {
        portable::rows::select_rows(out, x, rows);
    }

    fn cache(&self, spec: KvSpec) -> HostCache {
        let cache = HostCache::new(spec);
        cache.memory().into_iter().for_each(advise_huge_pages);
        cache
    }

    fn rope(&self, x: &mut HostBuffer, positions: &[u32], spec: &RopeSpec) {
        rows::rope(self.machine(), x, positions, spec);
    }

    fn cache_write(&self, cache: &mut HostCache, k: &HostBuffer, v: &HostBuffer, runs: &[Run<'_>]) {
        cache::write(self.machine(), cache, k, v, runs);
    }

    fn attention(
        &self,
        out: &mut HostBuffer,
        q: &HostBuffer,
        cache: &HostCache,
        runs: &[Run<'_>],
        spec: &AttentionSpec<'_, HostBuffer>,
    ) {
        attention::attention(self.machine(), out, q, cache, runs, spec);
    }

    fn routing(&self, tokens: usize, top_k: usize) -> HostRouting {
        HostRouting::with_capacity(tokens, top_k)
    }

    fn route(&self, out: &mut HostRouting, logits: &HostBuffer, spec: &RouteSpec<'_, HostBuffer>) {
        out.route(logits, spec);
    }

    fn expert_matmul(&self, out: &mut HostBuffer, x: &HostBuffer, w: &PackedWeight, routing: &HostRouting) {
        product::expert_matmul(self.machine(), out, x, w, routing);
    }

    fn expert_add(&self, x: &mut HostBuffer, bias: &HostBuffer, routing: &HostRouting) {
        portable::experts::expert_add(x, bias, routing);
    }

    fn expert_combine(&self, out: &mut HostBuffer, x: &HostBuffer, routing: &HostRouting) {
        rows::expert_combine(self.machine(), out, x, routing);
    }

    fn causal_conv(
        &self,
        out: &mut HostBuffer,
        x: &HostBuffer,
        weight: &HostBuffer,
        state: &mut HostBuffer,
        runs: &[Run<'_>],
    ) {
        conv::causal_conv(self.machine(), out, x, weight, state, runs);
    }

    fn delta_rule(
        &self,
        out: &mut HostBuffer,
        qkv: &HostBuffer,
        decay: &HostBuffer,
        beta: &HostBuffer,
        state: &mut HostBuffer,
        runs: &[Run<'_>],
        spec: DeltaSpec,
    ) {
        delta::delta_rule(self.machine(), out, qkv, decay, beta, state, runs, spec);
    }

    fn delta_gates(&self, a: &mut HostBuffer, b: &mut HostBuffer, a_log: &HostBuffer, dt_bias: &HostBuffer) {
        portable::delta::delta_gates(a, b, a_log, dt_bias);
    }
}
