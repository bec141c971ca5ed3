//! One run, from flags to a session that answers. The same command runs in the launcher and in every rank; [`start`] is where
//! their ways part, and only the process that drives the run comes back with a [`Session`].

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use consort_cluster::{Hostfile, Input, RankIdentity};
use consort_cpu::{Cpu, CpuOptions, allowed_cores};
use consort_engine::{Driver, EngineError, Rank, RankOptions, RankReport, agreement};
use consort_fabric::{Fabric, FabricOptions};
use consort_models::Plan;

use crate::flags::RunFlags;
use crate::invocation::Invocation;
use crate::model::ModelFiles;
use crate::progress::Progress;
use crate::report::Conditions;

/// Context that is reserved when the user names none and the model allows more.
const DEFAULT_CONTEXT: usize = 4096;

/// Rank 0 of a loaded run.
pub struct Session {
    /// Generates.
    pub driver: Driver<Cpu>,
    /// The model that was loaded.
    pub model: ModelFiles,
    /// How long loading took.
    pub load_s: f64,
    /// What its figures depend on.
    pub conditions: Conditions,
    /// The connections to other ranks, kept until the end.
    fabric: Option<Fabric>,
}

/// Starts what this process is to be. The launcher returns `None` when all its ranks have ended well, a rank other than 0 when
/// rank 0 has ended the run.
///
/// `prepare` checks the user's input and makes of it what the command will need. It runs before any weight is read, in the
/// launcher too, so that mistakes are told once and at once.
pub fn start<P>(
    invocation: &Invocation,
    model: &str,
    flags: &RunFlags,
    input: Input,
    prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
) -> Result<Option<(Session, P)>> {
    match &invocation.identity {
        Some(identity) => take_part(invocation, identity, model, flags, prepare),
        None => begin(invocation, model, flags, input, prepare),
    }
}

/// The process that the user started.
fn begin<P>(
    invocation: &Invocation,
    model: &str,
    flags: &RunFlags,
    input: Input,
    prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
) -> Result<Option<(Session, P)>> {
    let here = Hostfile::local(1);
    let hosts = invocation.hostfile.as_ref().unwrap_or(&here);
    // Where no rank runs on this machine, the model need not be on it either, and its ranks find mistakes.
    let files = match hosts.hosts.iter().find(|host| host.is_this_machine()) {
        Some(host) => Some(ModelFiles::open(model, host.weights.as_deref())?),
        None => None,
    };
    let plan = choose_plan(flags, invocation.hostfile.as_ref(), files.as_ref())?;
    if let Some(files) = files {
        let options = options(flags, &files);
        options.check_context(&files.outline)?;
        if let (None, Some(memory_bytes)) = (&invocation.hostfile, consort_cluster::doctor::installed_bytes()) {
            options.check_memory(&files.outline, memory_bytes)?;
        }
        let prepared = prepare(&files, &options)?;
        files.measure(&plan)?;
        if let Some(first) = files.checkpoint.skipped().first() {
            let count = files.checkpoint.skipped().len();
            eprintln!(
                "{count} tensors take no part in text and are left alone: {first}{}",
                if count > 1 { ", …" } else { "" }
            );
        }
        if plan.ranks() == 1 && invocation.hostfile.is_none() {
            let cpu = cpu(flags, None)?;
            let part = Part { files, flags, plan, identity: None, fabric: None };
            return Ok(Some((part.lead(cpu)?, prepared)));
        }
    }
    let mut arguments = invocation.arguments.clone();
    if flags.plan.is_none() {
        arguments.extend(["--plan".into(), plan.to_string().into()]);
    }
    invocation.launch(arguments, plan.ranks(), flags.network.port, flags.network.key()?, input)?;
    Ok(None)
}

/// A process that a launcher started.
fn take_part<P>(
    invocation: &Invocation,
    identity: &RankIdentity,
    model: &str,
    flags: &RunFlags,
    prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
) -> Result<Option<(Session, P)>> {
    let plan = flags.plan.clone().unwrap_or(Plan::single());
    ensure!(
        plan.ranks() == identity.size,
        "plan {plan} needs {} ranks, the launcher started {}",
        plan.ranks(),
        identity.size
    );
    let files = ModelFiles::open(model, identity.weights.as_deref())?;
    let prepared = match identity.rank {
        0 => Some(prepare(&files, &options(flags, &files))?),
        _ => None,
    };
    let cpu = cpu(flags, Some(identity))?;
    let fabric = Fabric::connect(FabricOptions {
        agreement: agreement(&files.checkpoint, &plan, &options(flags, &files), &settings(flags)),
        ..flags.network.options(identity, invocation.key(), invocation.connect_timeout())?
    })?;
    let part = Part { files, flags, plan, identity: Some(identity), fabric: Some(fabric) };
    match prepared {
        Some(prepared) => Ok(Some((part.lead(cpu)?, prepared))),
        None => {
            part.follow(cpu)?;
            Ok(None)
        }
    }
}

/// Settings beside the engine's own that must be equal on all ranks.
fn settings(flags: &RunFlags) -> [(&'static str, String); 2] {
    [("version", env!("CARGO_PKG_VERSION").to_owned()), ("activations", flags.activations.name().to_owned())]
}

fn options(flags: &RunFlags, files: &ModelFiles) -> RankOptions {
    let context = flags.context.map_or(files.outline.context.min(DEFAULT_CONTEXT), |context| context as usize);
    let defaults = RankOptions::default();
    let step_tokens = flags.chunk.map_or(defaults.step_tokens, |tokens| tokens as usize);
    RankOptions { context, step_tokens, kv_format: flags.kv_format.into(), ..defaults }
}

/// The plan that the user asked for, or one for the number of ranks: tensor on one machine, where links are fast and every
/// rank then works on every token; pipeline between machines, which moves least; and whichever fits, if only one does.
fn choose_plan(flags: &RunFlags, hostfile: Option<&Hostfile>, files: Option<&ModelFiles>) -> Result<Plan> {
    let ranks = flags.ranks.map(usize::from);
    if let Some(plan) = &flags.plan {
        if let Some(ranks) = ranks.filter(|ranks| *ranks != plan.ranks()) {
            bail!("-n {ranks} contradicts --plan {plan}, which needs {} ranks: leave one of them out", plan.ranks());
        }
        return Ok(plan.clone());
    }
    let ranks = ranks.or(hostfile.map(Hostfile::slots)).unwrap_or(1);
    if ranks == 1 {
        return Ok(Plan::single());
    }
    let mut plans = [Plan::new(1, ranks), Plan::new(ranks, 1)];
    if hostfile.is_some_and(|file| file.hosts.len() > 1) {
        plans.reverse();
    }
    let fits = |plan: &&Plan| files.is_none_or(|files| files.measure(plan).is_ok());
    Ok(plans.iter().find(fits).unwrap_or(&plans[0]).clone())
}

/// This rank's processor cores: its share of those that the ranks of this machine divide.
fn cpu(flags: &RunFlags, identity: Option<&RankIdentity>) -> Result<Cpu> {
    let (rank, ranks) = identity.map_or((0, 1), |identity| (identity.local_rank, identity.local_size));
    let cores = allowed_cores();
    let share = &cores[cores.len() * rank / ranks..cores.len() * (rank + 1) / ranks];
    let threads = flags.threads.map_or(share.len().max(1), usize::from);
    // Threads that must share cores are better placed by the system.
    let unpinned = threads > share.len();
    let cores = (!unpinned).then(|| share.to_vec());
    let activations = flags.activations.into();
    Ok(Cpu::new(CpuOptions { threads: Some(threads), cores, unpinned, activations, isa: None })?)
}

/// This process's part in a run, connected and not yet loaded.
struct Part<'a> {
    files: ModelFiles,
    flags: &'a RunFlags,
    plan: Plan,
    identity: Option<&'a RankIdentity>,
    fabric: Option<Fabric>,
}

impl Part<'_> {
    /// Loads this rank's part of the model.
    fn load(&self, cpu: Cpu) -> Result<Rank<Cpu>, EngineError> {
        let Self { files, plan, .. } = self;
        let (rank, host) = self.identity.map_or((0, "localhost"), |identity| (identity.rank, identity.host.as_str()));
        let placement = files.outline.place(plan, rank)?;
        let total_bytes = consort_models::measure(&files.checkpoint, &placement)?.iter().map(|held| held.bytes).sum();
        let mut progress = Progress::new();
        // The other ranks load at the same time, and as much.
        if rank == 0 {
            progress.begin(&format!("loading {}", files.name), Some(total_bytes));
        }
        let mut on_bytes = |bytes| {
            if rank == 0 {
                progress.advance(bytes);
            }
        };
        let options = options(self.flags, files);
        let loaded = Rank::start(cpu, &files.checkpoint, plan, self.fabric.as_ref(), host, options, &mut on_bytes);
        progress.finish();
        loaded.inspect_err(|error| self.tell_others(error))
    }

    /// Works until rank 0 ends the run.
    fn follow(self, cpu: Cpu) -> Result<(), EngineError> {
        self.load(cpu)?.follow().inspect_err(|error| self.tell_others(error))
    }

    /// Becomes the rank that drives the run.
    fn lead(self, cpu: Cpu) -> Result<Session> {
        let begin = Instant::now();
        let (threads, backend) = (cpu.pool().threads(), format!("cpu ({})", cpu.isa()));
        let rank = self.load(cpu)?;
        let load_s = begin.elapsed().as_secs_f64();
        let options = *rank.options();
        let peers = self.fabric.as_ref().map_or(&[][..], Fabric::peers);
        let links = || peers.iter().filter(|peer| peer.rank != 0);
        let mut transports: Vec<&str> = links().map(|peer| peer.transport).collect();
        transports.sort_unstable();
        transports.dedup();
        let conditions = Conditions {
            model: self.files.name.clone(),
            architecture: self.files.architecture().to_owned(),
            formats: self.files.formats(),
            context: options.context,
            chunk: options.step_tokens,
            batch: options.sequences,
            ranks: self.plan.ranks(),
            plan: self.plan.to_string(),
            transport: if transports.is_empty() { "none".to_owned() } else { transports.join("+") },
            rails: links().map(|peer| peer.rails).min().unwrap_or(0),
            emulated_link: self.flags.network.emulation().map(str::to_owned),
            encrypted: self.flags.network.encrypt,
            threads,
            activations: self.flags.activations.name(),
            kv_format: format!("{:?}", options.kv_format),
            backend,
            version: env!("CARGO_PKG_VERSION"),
        };
        eprintln!("{}", conditions.line());
        Ok(Session { driver: Driver::new(rank), model: self.files, load_s, conditions, fabric: self.fabric })
    }

    /// A rank that cannot go on says why; the loss of another rank they know already.
    fn tell_others(&self, error: &EngineError) {
        if let Some(fabric) = self.fabric.as_ref().filter(|_| !crate::error::is_witness(error)) {
            fabric.abort(&error.to_string());
        }
    }
}

impl Session {
    /// Ends the run on all ranks and returns their reports.
    pub fn finish(mut self) -> Result<Vec<RankReport>> {
        let reports = self.driver.reports()?;
        self.driver.end()?;
        drop(self.fabric);
        Ok(reports)
    }
}
