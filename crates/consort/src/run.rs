//! One run, from flags to a session that answers. The same command runs in the launcher and in every rank; [`start`] is where
//! their ways part, and only the process that drives the run comes back with a [`Session`].

use std::ffi::OsString;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use consort_checkpoint::Manifest;
use consort_cluster::{Hostfile, Input, RankIdentity, Recovery, Replay};
use consort_cpu::{Cpu, CpuOptions, allowed_cores};
use consort_engine::{
    Driver, Files, LoadProgress, Rank, RankOptions, RankReport, agreement, compare_files, load_together,
};
use consort_fabric::{Fabric, FabricOptions};
use consort_models::{Held, LoadHooks, Plan, RepackedCache};

use crate::flags::RunFlags;
use crate::invocation::Invocation;
use crate::model::ModelFiles;
use crate::network::Transport;
use crate::output;
use crate::progress::Progress;
use crate::report::{Conditions, link_line, traffic_line};

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
        // Another machine may have it.
        Some(host) if hosts.hosts.len() > 1 => ModelFiles::find(model, host.weights.as_deref())?,
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
            let part = Part { model, own: Some(files), flags, plan, identity: None, fabric: None };
            let (session, ()) = part.lead(cpu, None, |_, _| Ok(()))?;
            return Ok(Some((session, prepared)));
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
    let own = ModelFiles::find(model, identity.weights.as_deref())?;
    // This program's own launcher names the plan; another knows of none.
    let spread = identity.local_size < identity.size;
    let plan = flags.plan.clone().unwrap_or_else(|| plan_for(identity.size, spread, own.as_ref()));
    for ranks in [Some(plan.ranks()), flags.ranks.map(usize::from)].into_iter().flatten() {
        ensure!(ranks == identity.size, "plan {plan} needs {ranks} ranks, the launcher started {}", identity.size);
    }
    let cpu = cpu(flags, Some(identity))?;
    let fabric = Fabric::connect(FabricOptions {
        agreement: agreement(&plan, settings(flags)),
        ..flags.network.options(identity, invocation.key(), invocation.connect_timeout())?
    })?;
    if identity.rank == 0 && flags.network.transport == Transport::Auto {
        link_line(fabric.peers()).iter().for_each(|line| eprintln!("{line}"));
    }
    let part = Part { model, own, flags, plan, identity: Some(identity), fabric: Some(fabric) };
    match identity.rank {
        0 => part.lead(cpu, invocation.replay(), prepare).map(Some),
        _ => part.follow(cpu).map(|()| None),
    }
}

/// Settings that must be equal on all ranks: of the program, and of its environment.
fn settings(flags: &RunFlags) -> Vec<(String, String)> {
    let number = |value: Option<u32>| value.map_or_else(|| "default".to_owned(), |value| value.to_string());
    let own = [
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("activations", flags.activations.name().to_owned()),
        ("context", number(flags.context)),
        ("chunk", number(flags.chunk)),
        ("kv-format", format!("{:?}", flags.kv_format)),
        ("verify", flags.files.verify.to_string()),
    ];
    let own = own.map(|(name, value)| (name.to_owned(), value));
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

/// A rank's share of the processor cores that the ranks of this machine divide; nothing if there are too few.
pub fn cores(identity: Option<&RankIdentity>) -> &'static [usize] {
    let (rank, ranks) = identity.map_or((0, 1), |identity| (identity.local_rank, identity.local_size));
    let cores = allowed_cores();
    &cores[cores.len() * rank / ranks..cores.len() * (rank + 1) / ranks]
}

/// This rank's processor, on its share of the cores.
pub fn cpu(flags: &RunFlags, identity: Option<&RankIdentity>) -> Result<Cpu> {
    let share = cores(identity);
    let threads = flags.threads.map_or(share.len().max(1), usize::from);
    // Threads that must share cores are better placed by the system.
    let unpinned = threads > share.len();
    let cores = (!unpinned).then(|| share.to_vec());
    let activations = flags.activations.into();
    Ok(Cpu::new(CpuOptions { threads: Some(threads), cores, unpinned, activations, isa: None })?)
}

/// This process's part in a run, connected and not yet loaded.
struct Part<'a> {
    model: &'a str,
    /// The model's files, if they are on this machine.
    own: Option<ModelFiles>,
    flags: &'a RunFlags,
    plan: Plan,
    identity: Option<&'a RankIdentity>,
    fabric: Option<Fabric>,
}

/// A loaded part.
struct Loaded<'a, P> {
    part: Part<'a>,
    rank: Rank<Cpu>,
    model: ModelFiles,
    prepared: P,
}

impl<'a> Part<'a> {
    /// Comes by the model's files, prepares, and loads this rank's part.
    fn load<P>(
        mut self,
        cpu: Cpu,
        prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
    ) -> Result<Loaded<'a, P>> {
        let loaded = self.agree_on_files().and_then(|files| self.load_files(&files, cpu, prepare));
        let (rank, fetched, prepared) = loaded.inspect_err(|error| self.tell_others(error))?;
        let model = self.own.take().or(fetched).context("a loaded rank has its files")?;
        Ok(Loaded { part: self, rank, model, prepared })
    }

    /// Compares the ranks' files. Where nobody has them, rank 0 fetches them.
    fn agree_on_files(&mut self) -> Result<Files> {
        let fabric = self.fabric.as_ref();
        loop {
            let manifest = self.own.as_ref().map(|own| self.manifest(own)).transpose()?;
            if let Some(files) = compare_files(fabric, manifest.as_ref())? {
                return Ok(files);
            }
            if self.identity.is_none_or(|identity| identity.rank == 0) {
                let weights = self.identity.and_then(|identity| identity.weights.as_deref());
                let fetched = ModelFiles::open(self.model, weights).with_context(|| {
                    format!("none of the {} ranks has {}; put it on one of the machines", self.plan.ranks(), self.model)
                });
                self.own = Some(fetched?);
            }
        }
    }

    fn manifest(&self, own: &ModelFiles) -> Result<Manifest> {
        if !self.flags.files.verify {
            return Ok(own.checkpoint.manifest().clone());
        }
        let mut progress = Progress::new();
        progress.begin(&format!("verifying {}", own.name), Some(0));
        let verified = own.checkpoint.verified_manifest(&mut |done, total| progress.update(done, total));
        progress.finish();
        Ok(verified?)
    }

    fn load_files<P>(
        &self,
        files: &Files,
        cpu: Cpu,
        prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
    ) -> Result<(Rank<Cpu>, Option<ModelFiles>, P)> {
        let Self { model, own, flags, plan, identity, fabric } = self;
        let (rank, host) = identity.map_or((0, "localhost"), |identity| (identity.rank, identity.host.as_str()));
        let mut progress = Progress::new();
        if rank == 0 {
            progress.begin(&format!("loading {model}"), Some(0));
        }
        let on_progress = |load: LoadProgress| {
            if rank == 0 {
                progress.update(load.loaded_bytes, load.total_bytes);
            }
        };
        let keep = flags.files.keep()?;
        let checkpoint = own.as_ref().map(|own| &own.checkpoint);
        let loaded = load_together(fabric.as_ref(), files, checkpoint, on_progress, |desk| {
            let fetched = match own {
                Some(_) => None,
                None => Some(ModelFiles::fetch(model, &files.manifest, keep.as_deref(), Box::new(desk.clone()))?),
            };
            let files = own.as_ref().or(fetched.as_ref()).context("a rank has its own files or another's")?;
            let options = options(flags, files);
            let prepared = prepare(files, &options)?;
            let held = files.measure_rank(plan, rank)?;
            desk.expect(held.iter().map(|held| held.bytes).sum());
            let repacked = match &flags.files.cache_repacked {
                Some(path) => {
                    Some(RepackedCache::open(path, &files.checkpoint).with_context(|| path.display().to_string())?)
                }
                None => None,
            };
            let hooks = LoadHooks {
                progress: &mut |bytes| desk.advance(bytes),
                warn: &mut |problem| eprintln!("warning: {problem}"),
                repacked: repacked.as_ref(),
            };
            let rank = Rank::start(cpu, &files.checkpoint, plan, fabric.as_ref(), host, options, hooks)?;
            Ok((rank, fetched, prepared))
        });
        progress.finish();
        if let Ok((_, Some(fetched), _)) = &loaded
            && let Some(traffic) = fetched.remote.as_ref().map(|remote| remote.traffic())
        {
            eprintln!("{}", traffic_line(model, &traffic));
        }
        loaded
    }

    /// Works until rank 0 ends the run.
    fn follow(self, cpu: Cpu) -> Result<()> {
        let Loaded { part, rank, .. } = self.load(cpu, |_, _| Ok(()))?;
        rank.follow().map_err(anyhow::Error::from).inspect_err(|error| part.tell_others(error))
    }

    /// Becomes the rank that drives the run.
    fn lead<P>(
        self,
        cpu: Cpu,
        replay: Option<Replay>,
        prepare: impl FnOnce(&ModelFiles, &RankOptions) -> Result<P>,
    ) -> Result<(Session, P)> {
        let begin = Instant::now();
        let (threads, backend) = (cpu.pool().threads(), format!("cpu ({})", cpu.isa()));
        let Loaded { part, rank, model, prepared } = self.load(cpu, prepare)?;
        let load_s = begin.elapsed().as_secs_f64();
        let options = *rank.options();
        let peers = part.fabric.as_ref().map_or(&[][..], Fabric::peers);
        let links = || peers.iter().filter(|peer| peer.rails > 0);
        let mut transports: Vec<&str> = links().map(|peer| peer.transport).collect();
        transports.sort_unstable();
        transports.dedup();
        let conditions = Conditions {
            model: model.name.clone(),
            architecture: model.architecture().to_owned(),
            formats: model.formats(),
            context: options.context,
            chunk: options.step_tokens,
            batch: options.sequences,
            ranks: part.plan.ranks(),
            plan: part.plan.to_string(),
            transport: if transports.is_empty() { "none".to_owned() } else { transports.join("+") },
            rails: links().map(|peer| peer.rails).min().unwrap_or(0),
            emulated_link: part.flags.network.emulation().map(str::to_owned),
            encrypted: part.flags.network.encrypt,
            wire: part.flags.network.wire,
            threads,
            activations: part.flags.activations.name(),
            kv_format: format!("{:?}", options.kv_format),
            backend,
            version: env!("CARGO_PKG_VERSION"),
        };
        eprintln!("{}", conditions.line());
        let session = Session { driver: Driver::new(rank), model, load_s, conditions, fabric: part.fabric, replay };
        Ok((session, prepared))
    }

    /// A rank that cannot go on says why; the loss of another rank they know already.
    fn tell_others(&self, error: &anyhow::Error) {
        let is_witness = error.downcast_ref().is_some_and(crate::error::is_witness);
        if let Some(fabric) = self.fabric.as_ref().filter(|_| !is_witness) {
            fabric.abort(&format!("{error:#}"));
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
