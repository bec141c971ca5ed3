//! The command line that starts each rank, on this machine or over ssh.

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use consort_fabric::{ClusterKey, ReservedPort};

use crate::control::{CONTROL, control_value};
use crate::error::ClusterError;
use crate::hostfile::{Device, Host, Hostfile, is_variable_name};
use crate::identity::{self, RankIdentity};

/// The port of the rendezvous where rank 0 is on another machine, so that a firewall can be opened for it.
const DEFAULT_PORT: u16 = 29517;

/// Seconds that ssh may take to connect for a run.
const SSH_CONNECT_TIMEOUT_S: u32 = 10;

/// Names a key to a process that a user starts. It stays out of what ranks get: theirs comes through the control channel.
const KEY: &str = "CONSORT_KEY";
/// Where models are kept.
const HOME: &str = "CONSORT_HOME";

/// What to start, and where.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The executable; a remote host uses the same path unless its entry in the hostfile says otherwise.
    pub program: PathBuf,
    /// Arguments, the same for every rank.
    pub arguments: Vec<OsString>,
    /// The machines.
    pub hostfile: Hostfile,
    /// How many of their slots to use, in order.
    pub ranks: usize,
    /// The port that rank 0 listens on; `None` takes a free one where rank 0 is on this machine, else a fixed default.
    pub port: Option<u16>,
    /// The address that rank 0 listens on, where it is not the one at which the others look for it.
    pub bind: Option<IpAddr>,
    /// Environment for every rank beside what the hostfile says.
    pub environment: Vec<(String, String)>,
    /// What ranks prove to each other; not needed where all of them are on this machine.
    pub key: Option<ClusterKey>,
    /// How long a rank may say nothing before the others count it as lost.
    pub hang_timeout: Duration,
    /// Whether ranks may be started again, so that rank 0 tells what it generates and is told what was.
    pub recovers: bool,
    /// Whether what rank 0 writes is shown on a terminal.
    pub terminal: bool,
}

/// A rank that is ready to be started.
#[derive(Debug)]
pub struct RankCommand {
    /// The rank.
    pub rank: usize,
    /// Its host, for messages.
    pub host: String,
    /// Whether the process that is started here is an ssh client.
    pub remote: bool,
    /// The process to start.
    pub command: Command,
    /// What the control channel begins with.
    pub key: Option<ClusterKey>,
}

impl Launch {
    /// One command per rank, in rank order.
    ///
    /// # Errors
    /// The hosts have too few slots, rank 0 has no address that the others could reach, or has one and there is no key.
    pub fn commands(&self) -> Result<Vec<RankCommand>, ClusterError> {
        let slots = self.hostfile.slots();
        if self.ranks > slots {
            return Err(ClusterError::TooFewSlots { ranks: self.ranks, slots });
        }
        let hosts: Vec<&Host> = self
            .hostfile
            .hosts
            .iter()
            .flat_map(|host| std::iter::repeat_n(host, host.slots))
            .take(self.ranks)
            .collect();
        let (address, reserved) = self.rendezvous(&hosts)?;
        let open = [Some(address.ip()), self.bind].into_iter().flatten().find(|ip| !ip.is_loopback());
        if let Some(ip) = open.filter(|_| hosts.len() > 1 && self.key.is_none()) {
            return Err(ClusterError::NeedsKey { address: SocketAddr::new(ip, address.port()) });
        }
        let rendezvous = address.to_string();
        let run_id = run_id();
        let identity = |rank: usize| RankIdentity {
            rank,
            size: hosts.len(),
            local_rank: hosts[..rank].iter().filter(|host| same_machine(host, hosts[rank])).count(),
            local_size: hosts.iter().filter(|host| same_machine(host, hosts[rank])).count(),
            rendezvous: rendezvous.clone(),
            run_id: run_id.clone(),
            host: hosts[rank].ssh.clone(),
            addresses: hosts[rank].ips.clone(),
            rdma: self.devices(&hosts, rank),
            weights: hosts[rank].weights.clone(),
        };
        let mut commands: Vec<_> = (0..hosts.len()).map(|rank| self.command(hosts[rank], &identity(rank))).collect();
        if let (Some(port), Some(first)) = (reserved, commands.first_mut()) {
            port.keep_in(&mut first.command);
        }
        Ok(commands)
    }

    /// The same without one rank, whose host takes one rank less from now on.
    pub(crate) fn without(&self, rank: usize) -> Self {
        let slots = |host: &Host| host.slots;
        let ends = self.hostfile.hosts.iter().map(slots).scan(0, |sum, slots| {
            *sum += slots;
            Some(*sum)
        });
        let mut hostfile = self.hostfile.clone();
        if let Some(at) = ends.into_iter().position(|end| rank < end) {
            hostfile.hosts[at].slots -= 1;
            let left: Vec<usize> = (0..hostfile.hosts.len()).filter(|&host| hostfile.hosts[host].slots > 0).collect();
            hostfile = hostfile.subset(&left);
        }
        Self { hostfile, ranks: self.ranks - 1, ..self.clone() }
    }

    /// For each rank, the devices that lead from `rank` to it. The hostfile lists them by host.
    fn devices(&self, hosts: &[&Host], rank: usize) -> Vec<Vec<Device>> {
        let lists = &hosts[rank].rdma;
        if lists.is_empty() {
            return Vec::new();
        }
        let place = |host: &Host| self.hostfile.hosts.iter().position(|listed| std::ptr::eq(listed, host));
        let towards = |host: &&Host| place(host).and_then(|at| lists.get(at)).cloned().unwrap_or_default();
        hosts.iter().map(towards).collect()
    }

    fn command(&self, host: &Host, identity: &RankIdentity) -> RankCommand {
        let remote = !host.is_this_machine();
        let environment = self.environment(identity, remote);
        let program = host.executable.as_ref().unwrap_or(&self.program);
        let mut command = match remote {
            true => {
                ssh(host, &remote_script(program.as_os_str(), &self.arguments, &environment), SSH_CONNECT_TIMEOUT_S)
            }
            false => {
                let mut command = Command::new(program);
                command.args(&self.arguments).envs(environment);
                command
            }
        };
        // A group of its own, so that Ctrl-C reaches the launcher alone, which then ends the rank and all that it started.
        command.process_group(0);
        end_with_parent(&mut command);
        RankCommand { rank: identity.rank, host: identity.host.clone(), remote, command, key: self.key.clone() }
    }

    /// What a rank's environment gets beside what its host gives it: the hostfile's and the launch's variables, the settings
    /// that the launcher itself was given (so that they cannot differ between hosts), and the rank's identity.
    fn environment(&self, identity: &RankIdentity, remote: bool) -> Vec<(String, String)> {
        let first = identity.rank == 0;
        let control = control_value(self.key.is_some(), self.recovers && first, remote, self.terminal && first);
        let identity = identity.to_environment().into_iter().chain([(CONTROL, control)]);
        let backtrace = std::env::var("RUST_BACKTRACE").ok().map(|value| ("RUST_BACKTRACE".to_owned(), value));
        settings()
            .chain(backtrace)
            .chain(self.hostfile.environment.iter().cloned())
            .chain(self.environment.iter().cloned())
            .chain(identity.map(|(name, value)| (name.to_owned(), value)))
            .collect()
    }

    /// Where the others will look for rank 0, and the port on which it will listen if that was not named but found on this machine.
    fn rendezvous(&self, hosts: &[&Host]) -> Result<(SocketAddr, Option<ReservedPort>), ClusterError> {
        let Some(first) = hosts.first() else { return Err(ClusterError::TooFewSlots { ranks: 1, slots: 0 }) };
        let all_here = hosts.iter().all(|host| host.is_this_machine());
        let named_by_address = first.ssh.parse::<IpAddr>().ok().filter(|ip| all_here || !ip.is_loopback());
        let address = match first.ips.first().copied().or(named_by_address) {
            Some(address) => address,
            None if all_here => IpAddr::V4(Ipv4Addr::LOCALHOST),
            None => return Err(ClusterError::NoAddress { host: first.ssh.clone() }),
        };
        if !first.is_this_machine() {
            return Ok((SocketAddr::new(address, self.port.unwrap_or(DEFAULT_PORT)), None));
        }
        let (listens, named_by) = match self.bind {
            Some(ip) => (ip, "--bind"),
            None => (address, "the first of \"ips\" of its entry in the hostfile"),
        };
        let foreign =
            |error| ClusterError::ForeignAddress { host: first.ssh.clone(), address: listens, named_by, error };
        let reserved = ReservedPort::of(listens).map_err(foreign)?;
        // A port of the user's own choice is rank 0's to get; then it is only known that the address is this machine's.
        match self.port {
            Some(port) => Ok((SocketAddr::new(address, port), None)),
            None => Ok((SocketAddr::new(address, reserved.address().port()), Some(reserved))),
        }
    }
}

/// The variables of this process's environment that set how a rank works: not who it is, nor where models are kept, which is each
/// host's own affair. Launchers pass them on, and ranks compare them.
pub fn settings() -> impl Iterator<Item = (String, String)> {
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let is_setting = |name: &str| {
        name.starts_with("CONSORT_") && ![KEY, HOME, CONTROL].contains(&name) && !identity::is_variable(name)
    };
    // The name becomes part of a remote shell's command, as those of the hostfile do.
    let mut settings: Vec<_> = variables.filter(|(name, _)| is_setting(name) && is_variable_name(name)).collect();
    settings.sort();
    settings.into_iter()
}

/// Whether two entries of the hostfile are one machine, whose cores their ranks divide.
fn same_machine(one: &Host, other: &Host) -> bool {
    one.ssh == other.ssh || (one.is_this_machine() && other.is_this_machine())
}

fn run_id() -> String {
    // A clock before 1970 is no reason to refuse a run: the process id alone still tells apart the runs of one moment.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_micros())
}

/// A program that is to run once on a host, outside of any run: for questions about the host.
pub(crate) fn on_host(
    host: &Host,
    program: &Path,
    arguments: &[OsString],
    environment: &[(String, String)],
    connect_timeout_s: u32,
) -> Command {
    let program = host.executable.as_deref().unwrap_or(program);
    if host.is_this_machine() {
        let mut command = Command::new(program);
        command.args(arguments).envs(environment.iter().cloned());
        return command;
    }
    ssh(host, &remote_script(program.as_os_str(), arguments, environment), connect_timeout_s)
}

fn ssh(host: &Host, script: &OsStr, connect_timeout_s: u32) -> Command {
    let mut command = Command::new("ssh");
    // Never ask, since nobody may be there to answer; notice a dead connection within seconds; no terminal, which would
    // translate line ends and echo the control channel.
    command.args(["-T", "-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={connect_timeout_s}")]);
    command.args(["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2"]);
    if let Some(user) = &host.user {
        command.args(["-l", user]);
    }
    if let Some(port) = host.port {
        command.args(["-p", &port.to_string()]);
    }
    command.arg("--").arg(&host.ssh).arg(script);
    command
}

/// What the remote login shell is asked to run. It only has to understand `exec` and single quotes: `sh` does the rest.
fn remote_script(program: &OsStr, arguments: &[OsString], environment: &[(String, String)]) -> OsString {
    let mut script = OsString::new();
    if let Ok(directory) = std::env::current_dir() {
        // The launcher's directory where the host has it, so that relative paths mean the same.
        script.push("cd ");
        script.push(quote(directory.as_os_str()));
        script.push(" 2>/dev/null; ");
    }
    script.push("exec env");
    for (name, value) in environment {
        script.push(format!(" {name}="));
        script.push(quote(OsStr::new(value)));
    }
    for word in std::iter::once(program).chain(arguments.iter().map(OsString::as_os_str)) {
        script.push(" ");
        script.push(quote(word));
    }
    let mut command = OsString::from("exec sh -c ");
    command.push(quote(&script));
    command
}

/// Quotes a word for a POSIX shell, whatever bytes it holds.
fn quote(word: &OsStr) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend_from_slice(br"'\''"),
            other => quoted.push(other),
        }
    }
    quoted.push(b'\'');
    OsString::from_vec(quoted)
}

/// Has the kernel end the process when the launcher dies, for programs that do not watch their control channel.
#[cfg(target_os = "linux")]
fn end_with_parent(command: &mut Command) {
    let launcher = std::process::id();
    let ask_kernel = move || {
        // SAFETY: both calls take and return plain integers and are async-signal-safe, as code between fork and exec must be.
        let parent = unsafe {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::getppid()
        };
        // The launcher may have died before the request was made.
        if u32::try_from(parent) == Ok(launcher) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::BrokenPipe)) }
    };
    // SAFETY: the closure allocates nothing, takes no lock and makes only async-signal-safe calls.
    unsafe { command.pre_exec(ask_kernel) };
}

/// Elsewhere the control channel alone ends a rank.
#[cfg(not(target_os = "linux"))]
fn end_with_parent(_command: &mut Command) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(ssh: &str) -> Host {
        Host { ssh: ssh.to_owned(), slots: 1, ..Host::default() }
    }

    fn launch(hosts: Vec<Host>, ranks: usize) -> Launch {
        Launch {
            program: PathBuf::from("/opt/it's here/consort"),
            arguments: ["generate", "-p", "a 'b' \"c\" $HOME `x`\n\\"].map(OsString::from).to_vec(),
            hostfile: Hostfile { hosts, ..Hostfile::default() },
            ranks,
            port: Some(4000),
            bind: None,
            environment: vec![("NOTE".to_owned(), "two words; rm -rf /".to_owned())],
            key: None,
            hang_timeout: Duration::from_secs(10),
            recovers: false,
            terminal: false,
        }
    }

    fn words(command: &Command) -> Vec<String> {
        command.get_args().map(|word| word.to_str().unwrap().to_owned()).collect()
    }

    fn variable(command: &Command, name: &str) -> Option<String> {
        let (_, value) = command.get_envs().find(|(key, _)| *key == name)?;
        Some(value?.to_str().unwrap().to_owned())
    }

    #[test]
    fn local_ranks_get_their_identity_through_the_environment() {
        let mut two_slots = host("localhost");
        two_slots.slots = 2;
        let commands = launch(vec![two_slots, host("127.0.0.1")], 3).commands().unwrap();
        assert_eq!(commands.len(), 3);
        for (rank, (local_rank, local_size)) in [("0", "3"), ("1", "3"), ("2", "3")].into_iter().enumerate() {
            let RankCommand { command, remote, .. } = &commands[rank];
            assert!(!remote);
            assert_eq!(command.get_program(), "/opt/it's here/consort");
            assert_eq!(variable(command, "CONSORT_RANK"), Some(rank.to_string()));
            assert_eq!(variable(command, "CONSORT_SIZE").as_deref(), Some("3"));
            assert_eq!(variable(command, "CONSORT_LOCAL_RANK").as_deref(), Some(local_rank));
            assert_eq!(variable(command, "CONSORT_LOCAL_SIZE").as_deref(), Some(local_size));
            assert_eq!(variable(command, "CONSORT_RENDEZVOUS").as_deref(), Some("127.0.0.1:4000"));
            assert_eq!(variable(command, "CONSORT_CONTROL").as_deref(), Some("stdin"));
            assert_eq!(variable(command, "NOTE").as_deref(), Some("two words; rm -rf /"));
        }
    }

    #[test]
    fn rank_zero_alone_is_told_what_the_launcher_keeps_and_shows() {
        for (recovers, terminal, expected) in
            [(true, true, "stdin+journal+terminal"), (true, false, "stdin+journal"), (false, true, "stdin+terminal")]
        {
            let launch = Launch { recovers, terminal, ..launch(vec![host("localhost"), host("localhost")], 2) };
            let told = launch.commands().unwrap().into_iter().map(|rank| variable(&rank.command, "CONSORT_CONTROL"));
            assert_eq!(told.flatten().collect::<Vec<_>>(), [expected, "stdin"]);
        }
    }

    #[test]
    fn a_remote_rank_is_started_by_ssh_without_questions() {
        let mut first = host("m1");
        first.ips = vec!["fd00::1".parse().unwrap()];
        let mut second = host("m2");
        (second.user, second.port) = (Some("user".to_owned()), Some(2222));
        let launch = launch(vec![first, second], 2);
        let error = launch.commands().unwrap_err().to_string();
        assert!(error.contains("[fd00::1]:4000") && error.contains("`consort key new`"), "{error}");
        let key = ClusterKey::from_hex(&"4f".repeat(32));
        let commands = Launch { key, ..launch }.commands().unwrap();
        assert!(commands.iter().all(|rank| rank.remote && rank.command.get_program() == "ssh"));
        let words = words(&commands[1].command);
        let (options, rest) = words.split_at(words.iter().position(|word| word == "--").unwrap());
        for expected in [&["-o", "BatchMode=yes"], &["-l", "user"], &["-p", "2222"]] {
            assert!(options.windows(2).any(|pair| pair == expected), "{expected:?} in {options:?}");
        }
        assert_eq!((rest.len(), rest[1].as_str()), (3, "m2"));
        assert!(rest[2].contains("CONSORT_RENDEZVOUS="), "{}", rest[2]);
        assert!(rest[2].contains("[fd00::1]:4000"), "{}", rest[2]);
    }

    #[test]
    fn each_rank_is_told_its_devices_towards_every_other_rank() {
        let listing = |ssh: &str, slots: usize, rdma: [&[&str]; 3]| {
            let rdma = rdma.map(|names| names.iter().map(|&name| name.to_owned()).collect()).to_vec();
            Host { slots, rdma, ips: vec!["10.0.0.1".parse().unwrap()], ..host(ssh) }
        };
        let hosts = vec![
            listing("m1", 2, [&[], &["a"], &["b", "c"]]),
            listing("m2", 1, [&["a"], &[], &[]]),
            listing("m3", 1, [&["b", "c"], &[], &[]]),
        ];
        let key = ClusterKey::from_hex(&"4f".repeat(32));
        let commands = Launch { key, ..launch(hosts, 4) }.commands().unwrap();
        let told = |rank: usize| words(&commands[rank].command).pop().unwrap();
        assert!(told(1).contains(r#"[null,null,"a",["b","c"]]"#), "{}", told(1));
        assert!(told(2).contains(r#"["a","a",null,null]"#), "{}", told(2));
    }

    #[test]
    fn a_lost_rank_takes_its_slot_along_and_an_empty_host_goes() {
        let hosts = vec![Host { slots: 2, ..host("m1") }, host("m2"), host("m3")];
        let names = |launch: &Launch| {
            launch.hostfile.hosts.iter().map(|host| (host.ssh.clone(), host.slots)).collect::<Vec<_>>()
        };
        let named =
            |names: &[(&str, usize)]| names.iter().map(|&(name, slots)| (name.to_owned(), slots)).collect::<Vec<_>>();
        let whole = launch(hosts, 4);
        let first = whole.without(1);
        assert_eq!((names(&first), first.ranks), (named(&[("m1", 1), ("m2", 1), ("m3", 1)]), 3));
        assert_eq!(names(&first.without(1)), named(&[("m1", 1), ("m3", 1)]));
        assert_eq!(names(&whole.without(3)), named(&[("m1", 2), ("m2", 1)]));
    }

    #[test]
    fn a_key_is_never_part_of_a_command_line() {
        let mut remote = host("m1");
        remote.ips = vec!["10.0.0.1".parse().unwrap()];
        let key = ClusterKey::from_hex(&"4f".repeat(32)).unwrap();
        let launch = Launch { key: Some(key.clone()), ..launch(vec![remote, host("localhost")], 2) };
        for RankCommand { command, key: handed_over, .. } in launch.commands().unwrap() {
            assert!(!format!("{command:?}").contains(&key.to_hex()));
            assert_eq!(handed_over.as_ref(), Some(&key));
        }
    }

    /// The login shell and the inner `sh` both parse the script: run it and look at what arrives.
    #[test]
    fn words_survive_both_shells() {
        let program = OsStr::new("/usr/bin/printf");
        let arguments = ["%s|", "a 'b' \"c\" $HOME `x`\n\\", "", "-n", "*"].map(OsString::from);
        let script = remote_script(program, &arguments, &[("A".to_owned(), "'; exit 9; '".to_owned())]);
        let output = Command::new("sh").arg("-c").arg(&script).output().unwrap();
        assert!(output.status.success());
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "a 'b' \"c\" $HOME `x`\n\\||-n|*|");
        let script = remote_script(
            OsStr::new("sh"),
            &["-c", "echo \"$A\""].map(OsString::from),
            &[("A".to_owned(), "'; exit 9; '".to_owned())],
        );
        let output = Command::new("sh").arg("-c").arg(&script).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "'; exit 9; '\n");
    }

    #[test]
    fn too_many_ranks_and_a_missing_address_are_refused() {
        let error = launch(vec![host("localhost")], 2).commands().unwrap_err();
        assert!(error.to_string().contains("2 ranks were asked for, but the hosts have 1 slots"), "{error}");
        let error = launch(vec![host("localhost"), host("m2")], 2).commands().unwrap_err();
        assert!(error.to_string().contains("\"ips\""), "{error}");
    }

    #[test]
    fn a_free_port_is_taken_for_a_local_rank_0() {
        let mut launch = launch(vec![host("localhost")], 1);
        launch.port = None;
        let rendezvous = variable(&launch.commands().unwrap()[0].command, "CONSORT_RENDEZVOUS").unwrap();
        let address: SocketAddr = rendezvous.parse().unwrap();
        assert!(address.ip().is_loopback() && address.port() != 0);

        // Another address to listen on is held to the same rules.
        launch.bind = Some(Ipv4Addr::UNSPECIFIED.into());
        launch.commands().unwrap();
        (launch.hostfile.hosts[0].slots, launch.ranks) = (2, 2);
        let error = launch.commands().unwrap_err().to_string();
        assert!(error.starts_with("ranks meet at 0.0.0.0:") && error.contains("`consort key new`"), "{error}");
        // An address of documentation: no machine has it.
        for port in [None, Some(4000)] {
            (launch.bind, launch.port) = (Some("192.0.2.1".parse().unwrap()), port);
            let error = launch.commands().unwrap_err().to_string();
            assert!(error.starts_with("host 0 (localhost): rank 0 cannot listen on 192.0.2.1: "), "{error}");
            assert!(error.ends_with("; --bind must be an address of this machine"), "{error}");
        }
    }
}
