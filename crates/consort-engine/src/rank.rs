//! One rank: its part of the model, and the execution of steps.

use consort_checkpoint::Checkpoint;
use consort_compute::{Backend, KvFormat, Run};
use consort_fabric::{Agreement, Fabric, Group, Operation};
use consort_models::{
    Batch, BatchRun, CacheLayout, Held, LoadHooks, LoadOptions, Loaded, Model, Outline, Pass, Placement, Plan, Ranks,
};
use serde::{Deserialize, Serialize};

use crate::EngineError;
use crate::blocks::{AllTables, Tables};
use crate::step::{Answer, Command, Step, StepRun, Want};

/// How large a rank's caches and steps are. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankOptions {
    /// Tokens of context that each sequence may reach.
    pub context: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// Most tokens of one step: the chunk in which prompts are run.
    pub step_tokens: usize,
    /// Most rows of one step whose logits are wanted.
    pub logit_rows: usize,
    /// Tokens of a cache block.
    pub block_tokens: usize,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
}

impl Default for RankOptions {
    fn default() -> Self {
        Self {
            context: 4096,
            sequences: 1,
            step_tokens: 256,
            logit_rows: 64,
            block_tokens: 64,
            kv_format: KvFormat::default(),
        }
    }
}

impl RankOptions {
    /// Refuses a prompt that is empty, leaves no room for an answer or holds unknown tokens; for callers that want to know before
    /// they load.
    pub fn check_prompt(&self, outline: &Outline, prompt: &[u32]) -> Result<(), EngineError> {
        self.check_tokens(outline, prompt)?;
        match prompt.len() < self.context {
            true => Ok(()),
            false => Err(EngineError::NoRoom { context: self.context, most: outline.context }),
        }
    }

    /// The same for tokens that nothing is to follow.
    pub fn check_tokens(&self, outline: &Outline, prompt: &[u32]) -> Result<(), EngineError> {
        let (vocabulary, context) = (outline.vocabulary, self.context);
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(EngineError::UnknownToken { token, vocabulary });
        }
        if prompt.len() > context {
            return Err(EngineError::PromptTooLong { prompt: prompt.len(), context, most: outline.context });
        }
        Ok(())
    }

    /// Refuses a context beyond what the model was made for.
    pub fn check_context(&self, outline: &Outline) -> Result<(), EngineError> {
        let (context, most) = (self.context, outline.context);
        if context > most { Err(EngineError::ContextTooLong { context, most }) } else { Ok(()) }
    }

    /// Refuses a context whose keys and values alone are more than `memory_bytes`, the memory of all ranks together.
    pub fn check_memory(&self, outline: &Outline, memory_bytes: u64) -> Result<(), EngineError> {
        let row_bytes = self.kv_format.format().row_bytes(outline.kv_values) as u128;
        let tokens = self.context as u128 * self.sequences as u128;
        let cache_bytes = tokens * outline.full_layers as u128 * row_bytes;
        if cache_bytes <= u128::from(memory_bytes) {
            return Ok(());
        }
        let gb = |bytes: u128| bytes as f64 / 1e9;
        let (context, cache_gb, memory_gb) = (self.context, gb(cache_bytes), gb(u128::from(memory_bytes)));
        Err(EngineError::ContextTooLarge { context, cache_gb, memory_gb })
    }

    /// Cache blocks of a sequence in layers that see everything.
    pub(crate) fn blocks_per_sequence(&self) -> usize {
        self.context.div_ceil(self.block_tokens)
    }

    /// Cache blocks of a sequence in sliding-window layers: never more than the whole context takes.
    pub(crate) fn ring_blocks(&self, outline: &Outline) -> usize {
        outline.window.map_or(0, |window| {
            CacheLayout::ring_blocks(window, self.step_tokens, self.block_tokens).min(self.blocks_per_sequence())
        })
    }

    fn cache(&self, outline: &Outline) -> CacheLayout {
        CacheLayout {
            block_tokens: self.block_tokens,
            blocks: self.sequences * self.blocks_per_sequence(),
            window_blocks: self.sequences * self.ring_blocks(outline),
            slots: self.sequences,
            format: self.kv_format,
        }
    }
}

/// What must be equal on all ranks before they look at their files, each thing under its own name, so that a difference has
/// one: the plan, and whatever else decides how they work.
pub fn agreement(plan: &Plan, settings: Vec<(String, String)>) -> Agreement {
    let plan = ("plan".to_string(), plan.to_string());
    Agreement { items: std::iter::once(plan).chain(settings).collect() }
}

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// The transport of its data, `none` for a single rank.
    pub transport: String,
    /// Its stage of the pipeline.
    pub stage: usize,
    /// Its shard of the stage.
    pub shard: usize,
    /// First layer and one past the last.
    pub layers: (usize, usize),
    /// Bytes of weights that it holds, in their stored formats.
    pub weight_bytes: u64,
    /// The part of these that every shard of the stage holds alike.
    pub replicated_bytes: u64,
    /// The most memory that the process has had resident, where the system tells.
    pub peak_memory_bytes: Option<u64>,
    /// What it has spent on talking to other ranks so far, by kind of operation.
    pub communication: Vec<Communication>,
}

/// What a rank has spent on one kind of collective, over all its groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Communication {
    /// `all_reduce`, `all_gather`, …
    pub operation: String,
    /// Calls.
    pub calls: u64,
    /// Waits for peers, one after another.
    pub hops: u64,
    /// Payload bytes that this rank sent.
    pub bytes_sent: u64,
    /// Time spent, waiting included.
    pub seconds: f64,
}

/// One rank, loaded and connected.
pub struct Rank<B: Backend> {
    backend: B,
    model: Box<dyn Model<B>>,
    held: Vec<Held>,
    placement: Placement,
    outline: Outline,
    options: RankOptions,
    host: String,
    world: Group,
    ranks: Ranks,
    /// Rank 0 and the sampling rank, where these are two.
    answers: Option<Group>,
    next_step: u64,
    tables: AllTables,
    logits: B::Buffer,
    message: Vec<u8>,
}

impl<B: Backend> Rank<B> {
    /// Loads this rank's part of the model and takes its groups. Without a fabric it is the only rank. Machines load at very
    /// different speeds: within [`load_together`](crate::load_together) all ranks wait until all have loaded.
    ///
    /// `hooks` say how loading is watched and what it may use.
    pub fn start(
        backend: B,
        checkpoint: &Checkpoint,
        plan: &Plan,
        fabric: Option<&Fabric>,
        host: &str,
        options: RankOptions,
        hooks: LoadHooks<'_>,
    ) -> Result<Self, EngineError> {
        let outline = Outline::new(checkpoint)?;
        options.check_context(&outline)?;
        let world = fabric.map_or_else(Group::solo, Fabric::world);
        if world.size() != plan.ranks() {
            return Err(EngineError::PlanSize { plan: plan.to_string(), needed: plan.ranks(), ranks: world.size() });
        }
        let placement = outline.place(plan, world.rank())?;
        let (ranks, answers) = match fabric {
            Some(fabric) => take_groups(fabric, plan, &placement)?,
            None => (Ranks::solo(), None),
        };
        let load = LoadOptions {
            max_tokens: options.step_tokens,
            max_logit_rows: options.logit_rows.max(options.sequences).min(options.step_tokens),
            cache: options.cache(&outline),
        };
        let Loaded { model, held } = consort_models::load(&backend, checkpoint, &placement, &load, hooks)?;
        let logits = backend.buffer(if placement.is_last() { load.max_logit_rows * outline.vocabulary } else { 0 });
        Ok(Self {
            backend,
            model,
            held,
            placement,
            outline,
            options,
            host: host.to_string(),
            world,
            ranks,
            answers,
            next_step: 0,
            tables: AllTables::new(),
            logits,
            message: Vec::new(),
        })
    }

    /// Runs the steps that rank 0 sends, until it sends the end.
    pub fn follow(mut self) -> Result<(), EngineError> {
        loop {
            let mut message = std::mem::take(&mut self.message);
            self.world.broadcast(0, &mut message, true)?;
            let command = postcard::from_bytes(&message)?;
            self.message = message;
            match command {
                Command::Run(step) => {
                    self.execute(&step)?;
                }
                Command::Report => {
                    self.reports()?;
                }
                Command::End => return Ok(()),
            }
        }
    }

    /// Sends a command to all other ranks.
    pub(crate) fn announce(&mut self, command: &Command) -> Result<(), EngineError> {
        if self.world.size() > 1 {
            self.message = postcard::to_stdvec(command)?;
            self.world.broadcast(0, &mut self.message, false)?;
        }
        Ok(())
    }

    /// What the model is like.
    pub fn outline(&self) -> &Outline {
        &self.outline
    }

    /// How large caches and steps are.
    pub fn options(&self) -> &RankOptions {
        &self.options
    }

    /// Runs this rank's part of a step. On rank 0 the answers come back, one for each run that wants something, in order.
    pub(crate) fn execute(&mut self, step: &Step) -> Result<Vec<Answer>, EngineError> {
        if step.number != self.next_step {
            return Err(EngineError::StepOrder { expected: self.next_step, found: step.number });
        }
        self.next_step += 1;
        for sequence in &step.released {
            self.tables.remove(sequence);
        }
        for run in &step.runs {
            let tables = self.tables.entry(run.sequence).or_default();
            tables.full.extend(&run.new_blocks);
            tables.window.extend(&run.new_window_blocks);
        }

        let mut tokens = Vec::new();
        let mut positions = Vec::new();
        let mut logit_rows = Vec::new();
        let mut runs = Vec::with_capacity(step.runs.len());
        for run in &step.runs {
            let rows = tokens.len()..tokens.len() + run.tokens.len();
            logit_rows.extend(match run.want {
                Want::Nothing => 0..0,
                Want::Token(_) => rows.end as u32 - 1..rows.end as u32,
                Want::Logits => rows.start as u32..rows.end as u32,
            });
            tokens.extend(&run.tokens);
            positions.extend((run.start..).take(run.tokens.len()));
            runs.push(batch_run(run, rows, &self.tables[&run.sequence]));
        }
        let batch = Batch { tokens: &tokens, positions: &positions, runs: &runs, logit_rows: &logit_rows };
        let pass = Pass { backend: &self.backend, ranks: &self.ranks, batch: &batch };
        self.model.forward(&pass, &mut self.logits)?;

        let wanted = step.runs.iter().any(|run| run.want != Want::Nothing);
        if wanted { self.answer(step) } else { Ok(Vec::new()) }
    }

    /// The sampling rank (the first shard of the last stage) makes the answers; rank 0 receives them.
    fn answer(&mut self, step: &Step) -> Result<Vec<Answer>, EngineError> {
        let samples = self.placement.is_last() && self.placement.shard == 0;
        let mut answers = Vec::new();
        if samples {
            let vocabulary = self.outline.vocabulary;
            let make = |logits: &mut [f32]| {
                let mut rows = logits.chunks_exact(vocabulary);
                for run in &step.runs {
                    let last = u64::from(run.start) + run.tokens.len() as u64 - 1;
                    answers.extend(match &run.want {
                        Want::Nothing => None,
                        Want::Token(sampling) => {
                            let token = rows.next().and_then(|row| sampling.sample(row, last));
                            Some(token.map_or(Answer::NotANumber, Answer::Token))
                        }
                        Want::Logits => {
                            Some(Answer::Logits(rows.by_ref().take(run.tokens.len()).flatten().copied().collect()))
                        }
                    });
                }
            };
            self.backend.with_host(&mut self.logits, make).map_err(consort_models::ModelError::from)?;
        }
        if let Some(pair) = &self.answers {
            let mut message = if samples { postcard::to_stdvec(&answers)? } else { Vec::new() };
            pair.broadcast(1, &mut message, false)?;
            if !samples {
                answers = postcard::from_bytes(&message)?;
            }
        }
        Ok(answers)
    }

    /// Every rank's report, in rank order. A collective: all ranks call it.
    pub(crate) fn reports(&mut self) -> Result<Vec<RankReport>, EngineError> {
        let bytes = |only_replicated: bool| {
            self.held.iter().filter(|h| h.replicated || !only_replicated).map(|h| h.bytes).sum::<u64>()
        };
        let mine = RankReport {
            rank: self.world.rank(),
            host: self.host.clone(),
            transport: self.world.transport().to_string(),
            stage: self.placement.stage,
            shard: self.placement.shard,
            layers: (self.placement.layers.start, self.placement.layers.end),
            weight_bytes: bytes(false),
            replicated_bytes: bytes(true),
            peak_memory_bytes: peak_memory_bytes(),
            communication: self.communication(),
        };
        let messages = self.world.exchange(&postcard::to_stdvec(&mine)?, false)?;
        messages.iter().map(|message| Ok(postcard::from_bytes(message)?)).collect()
    }
}

impl<B: Backend> Rank<B> {
    fn communication(&self) -> Vec<Communication> {
        let Ranks { shards, previous, next } = &self.ranks;
        let groups = [Some(&self.world), Some(shards), previous.as_ref(), next.as_ref(), self.answers.as_ref()];
        let counters: Vec<_> = groups.into_iter().flatten().map(Group::counters).collect();
        let sum = |operation: Operation| {
            let mut total = Communication {
                operation: operation.name().to_string(),
                calls: 0,
                hops: 0,
                bytes_sent: 0,
                seconds: 0.0,
            };
            for (_, counter) in counters.iter().flatten().filter(|(of, _)| *of == operation) {
                total.calls += counter.calls;
                total.hops += counter.hops;
                total.bytes_sent += counter.bytes_sent;
                total.seconds += counter.nanoseconds as f64 * 1e-9;
            }
            total
        };
        Operation::ALL.map(sum).into_iter().filter(|spent| spent.calls > 0).collect()
    }
}

/// Every rank takes the same groups in the same order, so that group numbers agree.
fn take_groups(fabric: &Fabric, plan: &Plan, placement: &Placement) -> Result<(Ranks, Option<Group>), EngineError> {
    let rank_of = |stage: usize, shard: usize| stage * plan.tensor() + shard;
    let mut ranks = Ranks::solo();
    for stage in 0..plan.pipeline() {
        let members: Vec<usize> = (0..plan.tensor()).map(|shard| rank_of(stage, shard)).collect();
        if members.contains(&placement.rank) && members.len() > 1 {
            ranks.shards = fabric.group(&members)?;
        }
    }
    for stage in 1..plan.pipeline() {
        for shard in 0..plan.tensor() {
            let pair = [rank_of(stage - 1, shard), rank_of(stage, shard)];
            if pair[0] == placement.rank {
                ranks.next = Some(fabric.group(&pair)?);
            } else if pair[1] == placement.rank {
                ranks.previous = Some(fabric.group(&pair)?);
            }
        }
    }
    let sampler = rank_of(plan.pipeline() - 1, 0);
    let answers = match sampler != 0 && [0, sampler].contains(&placement.rank) {
        true => Some(fabric.group(&[0, sampler])?),
        false => None,
    };
    Ok((ranks, answers))
}

fn batch_run<'a>(run: &StepRun, rows: std::ops::Range<usize>, tables: &'a Tables) -> BatchRun<'a> {
    let with =
        |blocks: &'a [u32]| Run { rows: rows.clone(), start: run.start as usize, blocks, slot: run.slot as usize };
    BatchRun { full: with(&tables.full), window: with(&tables.window) }
}

/// The most memory that this process has had resident (`VmHWM` of Linux's /proc/self/status).
fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
