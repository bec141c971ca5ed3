//! One run, from flags to a session that answers. The same command runs in the launcher and in every rank; [`start`] is where
//! their ways part, and only the process that drives the run comes back with a [`Session`].

use std::ffi::OsString;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use consort_cluster::{Hostfile, Input, RankIdentity, Recovery, Replay};
use consort_cpu::{Cpu, CpuOptions, allowed_cores};
use consort_engine::{Driver, EngineError, Rank, RankOptions, RankReport, agreement};
use consort_fabric::{Fabric, FabricOptions};
use consort_models::{Held, Plan};

use crate::flags::RunFlags;
use crate::invocation::Invocation;
use crate::model::ModelFiles;
use crate::network::Transport;
use crate::output;
use crate::progress::Progress;
use crate::report::{Conditions, link_line};

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
    /// What this run has generated already, where it may be started again.
    pub replay: Option<Replay>,
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
    let mut prepared = None;
    if let Some(files) = &files {
        let options = options(flags, files);
        options.check_context(&files.outline)?;
        if let (None, Some(memory_bytes)) = (&invocation.hostfile, consort_cluster::doctor::installed_bytes()) {
            options.check_memory(&files.outline, memory_bytes)?;
        }
        prepared = Some(prepare(files, &options)?);
        files.measure(&plan)?;
        if let Some(first) = files.checkpoint.skipped().first() {
            let count = files.checkpoint.skipped().len();
            eprintln!(
                "{count} tensors take no part in text and are left alone: {first}{}",
                if count > 1 { ", …" } else { "" }
            );
        }
    }
    let ranks = plan.ranks();
    let most_losses = if flags.replan { ranks - 1 } else { 0 };
    let restarts = flags.restart.map_or(most_losses, usize::from);
    let files = match (files, prepared) {
        (Some(files), Some(prepared)) if ranks == 1 && invocation.hostfile.is_none() && restarts == 0 => {
            let cpu = cpu(flags, None)?;
            let part = Part { files, flags, plan, identity: None, fabric: None };
            return Ok(Some((part.lead(cpu, None)?, prepared)));
        }
        (files, _) => files,
    };
    let replan = |hosts: &Hostfile, ranks: usize| Ok(plan_flags(&replan(&plan, hosts, ranks, files.as_ref())?));
    let recovery = Recovery { restarts, replan: if flags.replan { Some(&replan) } else { None } };
    let arguments = invocation.arguments.iter().cloned().chain(plan_flags(&plan)).collect();
    invocation.launch(arguments, ranks, Some(&flags.network), input, recovery)?;
    Ok(None)
}

/// The flags that name a plan to ranks; where a user has named another, these count.
fn plan_flags(plan: &Plan) -> Vec<OsString> {
    ["--plan".to_owned(), plan.to_string(), "--ranks".to_owned(), plan.ranks().to_string()].map(Into::into).to_vec()
}

/// How the ranks that are left divide the model: as before as far as their number allows, else by whole layers. Every host must
/// have the memory for its part, as far as that is known.
fn replan(plan: &Plan, hosts: &Hostfile, ranks: usize, files: Option<&ModelFiles>) -> Result<Plan, String> {
    let mixed = ranks.is_multiple_of(plan.tensor()).then(|| Plan::new(ranks / plan.tensor(), plan.tensor()));
    let alone = if plan.pipeline() == 1 { Plan::new(1, ranks) } else { Plan::new(ranks, 1) };
    let mut obstacle = format!("{ranks} ranks cannot divide it as {plan} does");
    for mut next in [mixed, Some(alone), Some(Plan::new(ranks, 1))].into_iter().flatten() {
        if next.tensor() > 1 {
            next.experts = plan.experts;
        }
        match files.map_or(Ok(()), |files| fits(&next, hosts, files)) {
            Ok(()) => return Ok(next),
            Err(reason) => obstacle = reason,
        }
    }
    Err(obstacle)
}

/// Whether every host has the memory for the weights of its ranks, as far as memory is known.
fn fits(plan: &Plan, hosts: &Hostfile, files: &ModelFiles) -> Result<(), String> {
    let held = files.measure(plan).map_err(|error| format!("{error:#}"))?;
    let mut held = held.iter().map(|rank| rank.iter().map(|part| part.bytes).sum::<u64>());
    for host in &hosts.hosts {
        let bytes: u64 = held.by_ref().take(host.slots).sum();
        let here = || host.is_this_machine().then(consort_cluster::doctor::installed_bytes).flatten();
        if let Some(memory) = host.memory_bytes.or_else(here).filter(|memory| *memory < bytes) {
            let (bytes, memory) = (output::size(bytes), output::size(memory));
            return Err(format!("{plan} takes {bytes} of weights on {}, which has {memory}", host.ssh));
        }
    }
    Ok(())
}

/// A process that a launcher started.
fn take_part<P>(
    invocation: &Invocation,
    identity: &RankIdentity,
    model: &str,
    flags: &RunFlags,
    prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
) -> Result<Option<(Session, P)>> {
    let files = ModelFiles::open(model, identity.weights.as_deref())?;
    // This program's own launcher names the plan; another knows of none.
    let spread = identity.local_size < identity.size;
    let plan = flags.plan.clone().unwrap_or_else(|| plan_for(identity.size, spread, Some(&files)));
    for ranks in [Some(plan.ranks()), flags.ranks.map(usize::from)].into_iter().flatten() {
        ensure!(ranks == identity.size, "plan {plan} needs {ranks} ranks, the launcher started {}", identity.size);
    }
    let prepared = match identity.rank {
        0 => Some(prepare(&files, &options(flags, &files))?),
        _ => None,
    };
    let cpu = cpu(flags, Some(identity))?;
    let fabric = Fabric::connect(FabricOptions {
        agreement: agreement(&files.checkpoint, &plan, &options(flags, &files), &settings(flags)),
        ..flags.network.options(identity, invocation.key(), invocation.connect_timeout())?
    })?;
    if identity.rank == 0 && flags.network.transport == Transport::Auto {
        link_line(fabric.peers()).iter().for_each(|line| eprintln!("{line}"));
    }
    let part = Part { files, flags, plan, identity: Some(identity), fabric: Some(fabric) };
    match prepared {
        Some(prepared) => Ok(Some((part.lead(cpu, invocation.replay())?, prepared))),
        None => {
            part.follow(cpu)?;
            Ok(None)
        }
    }
}

/// Settings beside the engine's own that must be equal on all ranks: of the program, and of its environment.
fn settings(flags: &RunFlags) -> Vec<(String, String)> {
    let own = [("version", env!("CARGO_PKG_VERSION")), ("activations", flags.activations.name())];
    let own = own.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let environment = consort_cluster::settings().map(|(name, value)| (format!("environment variable {name}"), value));
    own.into_iter().chain(environment).collect()
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
    Ok(plan_for(ranks, hostfile.is_some_and(|file| file.hosts.len() > 1), files))
}

/// The plan that suits so many ranks, on several machines or on one.
fn plan_for(ranks: usize, several_machines: bool, files: Option<&ModelFiles>) -> Plan {
    if ranks == 1 {
        return Plan::single();
    }
    let mut plans = [Plan::new(1, ranks), Plan::new(ranks, 1)];
    if several_machines {
        plans.reverse();
    }
    let fits = |plan: &&Plan| files.is_none_or(|files| files.measure(plan).is_ok());
    plans.iter().find(fits).unwrap_or(&plans[0]).clone()
}

/// This rank's processor cores: its share of those that the ranks of this machine divide.
pub fn cpu(flags: &RunFlags, identity: Option<&RankIdentity>) -> Result<Cpu> {
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
    fn lead(self, cpu: Cpu, replay: Option<Replay>) -> Result<Session> {
        let begin = Instant::now();
        let (threads, backend) = (cpu.pool().threads(), format!("cpu ({})", cpu.isa()));
        let rank = self.load(cpu)?;
        let load_s = begin.elapsed().as_secs_f64();
        let options = *rank.options();
        let peers = self.fabric.as_ref().map_or(&[][..], Fabric::peers);
        let links = || peers.iter().filter(|peer| peer.rails > 0);
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
            wire: self.flags.network.wire,
            threads,
            activations: self.flags.activations.name(),
            kv_format: format!("{:?}", options.kv_format),
            backend,
            version: env!("CARGO_PKG_VERSION"),
        };
        eprintln!("{}", conditions.line());
        Ok(Session { driver: Driver::new(rank), model: self.files, load_s, conditions, fabric: self.fabric, replay })
    }

    /// A rank that cannot go on says why; the loss of another rank they know already.
    fn tell_others(&self, error: &EngineError) {
        if let Some(fabric) = self.fabric.as_ref().filter(|_| !crate::error::is_witness(error)) {
            fabric.abort(&error.to_string());
        }
    }
}

impl Session {
    /// What this rank holds of the model.
    pub fn held(&self) -> Result<Vec<Held>> {
        let plan = self.conditions.plan.parse()?;
        Ok(consort_models::measure(&self.model.checkpoint, &self.model.outline.place(&plan, 0)?)?)
    }

    /// Ends the run on all ranks and returns their reports.
    pub fn finish(mut self) -> Result<Vec<RankReport>> {
        let reports = self.driver.reports()?;
        self.driver.end()?;
        drop(self.fabric);
        Ok(reports)
    }
}
