//! Why a cluster does not work, in plain words: questions to each host and each link, and a remedy for each failure.
//!
//! Hosts are asked by running `consort` on them once; links are measured by a short run between the hosts, as any run would be
//! started, so that what is found here is what a run would meet.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cables::{self, Interface, RdmaFacts};
use crate::hostfile::{Host, Hostfile};
use crate::launch::on_host;
use crate::links::Link;

/// Seconds that ssh may take to connect.
const CONNECT_S: u32 = 5;
/// How long a host may take to answer, connecting included.
const ANSWER_PATIENCE: Duration = Duration::from_secs(20);
/// How long the measurement of links may take for each of them, and at least.
const LINK_PATIENCE: Duration = Duration::from_secs(5);
const MEASURE_PATIENCE: Duration = Duration::from_secs(60);
/// Clocks that differ by more make logs of several hosts unreadable.
const CLOCK_LIMIT_S: f64 = 2.0;

/// What a host says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Version of its `consort`.
    pub version: String,
    /// Seconds since 1970 when it said so.
    pub clock_s: f64,
    /// All of its memory, where the system tells.
    pub memory_bytes: Option<u64>,
    /// Memory that programs could get now, where the system tells.
    pub available_bytes: Option<u64>,
    /// The model that was asked for.
    pub model: Option<ModelFacts>,
    /// Its network interfaces that have an address.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
    /// Its RDMA devices.
    #[serde(default)]
    pub rdma: Vec<RdmaFacts>,
    /// Why it can have none.
    #[serde(default)]
    pub rdma_obstacle: Option<String>,
}

/// Whether a host has a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// As the user named it.
    pub name: String,
    /// The hash of its files' headers, or why it cannot be used.
    pub manifest_hash: Result<String, String>,
}

impl HostFacts {
    /// This machine's.
    pub fn here(version: &str, model: Option<ModelFacts>) -> Self {
        let clock_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let (rdma, rdma_obstacle) = match consort_fabric::rdma_devices() {
            Ok(devices) => (devices.into_iter().map(RdmaFacts::from).collect(), None),
            Err(obstacle) => (Vec::new(), Some(obstacle)),
        };
        Self {
            interfaces: cables::interfaces(),
            rdma,
            rdma_obstacle,
            version: version.to_owned(),
            clock_s,
            memory_bytes: installed_bytes(),
            available_bytes: available_bytes(),
            model,
        }
    }
}

/// Memory of this machine.
pub fn installed_bytes() -> Option<u64> {
    // SAFETY: sysconf takes and returns plain integers.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).ok()?.checked_mul(u64::try_from(page_bytes).ok()?)
}

/// Memory that programs on this machine could get now, where the system tells.
pub fn available_bytes() -> Option<u64> {
    available_in(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// The line `MemAvailable:  15000000 kB` of Linux's `/proc/meminfo`.
fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Something that does not work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// The host, or the link as `m1 -> m2`.
    pub place: String,
    /// What was seen.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl Failure {
    pub(crate) fn new(place: &str, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { place: place.to_owned(), what: what.into(), remedy: remedy.into() }
    }
}

/// A host's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Visit {
    /// What it said.
    pub facts: HostFacts,
    /// How far its clock is ahead of this machine's, in seconds; the time that the answer took to arrive makes it smaller.
    pub clock_ahead_s: f64,
}

/// Asks all hosts at once: runs `program` with `arguments` on each, which must print its [`HostFacts`] as one line of JSON.
pub fn visit_all(
    hosts: &[Host],
    program: &Path,
    arguments: impl Fn(&Host) -> Vec<OsString> + Sync,
) -> Vec<Result<Visit, Failure>> {
    // A question is no reason to fetch a model.
    let environment = [("HF_HUB_OFFLINE".to_owned(), "1".to_owned())];
    let (arguments, environment) = (&arguments, &environment);
    std::thread::scope(|scope| {
        let visits: Vec<_> = hosts
            .iter()
            .map(|host| {
                scope.spawn(move || visit(host, on_host(host, program, &arguments(host), environment, CONNECT_S)))
            })
            .collect();
        let lost = |host: &Host| Failure::new(&host.ssh, "the check itself failed", "report this defect of consort");
        visits.into_iter().zip(hosts).map(|(visit, host)| visit.join().unwrap_or_else(|_| Err(lost(host)))).collect()
    })
}

fn visit(host: &Host, command: Command) -> Result<Visit, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let remote = !host.is_this_machine();
    let answer = run(command, ANSWER_PATIENCE).map_err(|error| {
        Failure::new(&host.ssh, format!("{program} could not be started: {error}"), format!("install {program}"))
    })?;
    let facts = serde_json::from_str::<HostFacts>(&answer.stdout).ok().filter(|_| answer.succeeded());
    match facts {
        Some(facts) => {
            let arrival_s = answer.arrival.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            Ok(Visit { clock_ahead_s: facts.clock_s - arrival_s, facts })
        }
        None => Err(explain_silence(host, remote, &answer)),
    }
}

/// What ssh says when it cannot connect, and what helps. The first fragment that it said counts.
const SSH_REMEDIES: [(&str, &str); 7] = [
    ("Permission denied", "let this user log in there without a password: ssh-copy-id HOST"),
    ("Host key verification failed", "connect once by hand and accept the host's key: ssh HOST"),
    ("Could not resolve hostname", "correct the name in the hostfile, or add it to ~/.ssh/config or /etc/hosts"),
    ("Connection refused", "start the ssh server on HOST (macOS: System Settings, General, Sharing, Remote Login)"),
    ("timed out", "check that HOST is on and in this network, and that its firewall lets ssh through"),
    ("No route to host", "check that HOST is on and that its cable and address are right"),
    ("", "try ssh HOST by hand until it works without questions"),
];

fn explain_silence(host: &Host, remote: bool, answer: &Answer) -> Failure {
    let said = answer.last_error();
    let (what, remedy) = match answer.status.and_then(|status| status.code()) {
        None => ("it did not answer in time".to_owned(), "check its load, and try ssh HOST by hand".to_owned()),
        Some(255) if remote => {
            let remedy = SSH_REMEDIES.iter().find(|(fragment, _)| answer.stderr.contains(fragment));
            (format!("ssh cannot connect: {said}"), remedy.map_or_else(String::new, |(_, remedy)| (*remedy).to_owned()))
        }
        Some(126 | 127) => (
            "there is no consort to run".to_owned(),
            "install consort on HOST at the path of this one, or name its path as \"executable\" in the hostfile"
                .to_owned(),
        ),
        Some(code) => (
            format!("consort on it failed with exit code {code}: {said}"),
            "install the same version of consort on HOST as here".to_owned(),
        ),
    };
    Failure::new(&host.ssh, what, remedy.replace("HOST", &host.ssh))
}

/// What is wrong with the hosts that answered, seen together.
pub fn compare(hosts: &[Host], visits: &[Result<Visit, Failure>], version: &str) -> Vec<Failure> {
    let mut failures = Vec::new();
    let mut first_model: Option<(&str, &str)> = None;
    for (host, visit) in hosts.iter().zip(visits) {
        let Visit { facts, clock_ahead_s } = match visit {
            Ok(visit) => visit,
            Err(failure) => {
                failures.push(failure.clone());
                continue;
            }
        };
        let mut fail = |what: String, remedy: String| failures.push(Failure::new(&host.ssh, what, remedy));
        if facts.version != version {
            let what = format!("it has consort {}, this machine has {version}", facts.version);
            fail(what, format!("install consort {version} on {}", host.ssh));
        }
        if clock_ahead_s.abs() > CLOCK_LIMIT_S {
            let what = format!("its clock differs by {clock_ahead_s:+.0} s");
            fail(what, format!("turn on network time (NTP) on {}", host.ssh));
        }
        let Some(ModelFacts { name, manifest_hash }) = &facts.model else { continue };
        match (manifest_hash, first_model) {
            (Err(reason), _) => fail(
                format!("the model cannot be used: {reason}"),
                format!(
                    "copy {name} to {}, run `consort pull {name}` there, or set \"weights\" in the hostfile",
                    host.ssh
                ),
            ),
            (Ok(hash), Some((other, other_hash))) if hash != other_hash => fail(
                format!("its files of {name} are not those of {other}"),
                "copy the same files to all hosts".to_owned(),
            ),
            (Ok(hash), _) => first_model = first_model.or(Some((&host.ssh, hash))),
        }
    }
    failures
}

/// What failed runs say, and what helps. The first fragment that they said counts.
const LINK_REMEDIES: [(&str, &str); 6] = [
    ("`consort key new`", "make a key with `consort key new` and name it with --key"),
    ("add \"ips\"", "add the hosts' addresses as \"ips\" to the hostfile"),
    ("cannot listen on", "correct \"ips\" of the host that listens: they must be its own addresses"),
    ("cannot reach", "check \"ips\" and the cable, and let TCP connections through the firewalls of both hosts"),
    ("missing:", "check \"ips\" and the cable, and let TCP connections through the firewalls of both hosts"),
    ("disagree on", "install the same version of consort on both hosts"),
];

/// Measures the links between some of a file's hosts, by a run of `consort netbench --links` with one rank on each.
/// The links' ranks are indices into `hosts`.
///
/// # Errors
/// What the run said when it failed, with a remedy.
pub fn measure_links(
    hostfile: &Hostfile,
    hosts: &[usize],
    program: &Path,
    flags: &[OsString],
) -> Result<Vec<Link>, Failure> {
    let mut file = hostfile.subset(hosts);
    file.hosts.iter_mut().for_each(|host| host.slots = 1);
    let place = file.hosts.iter().map(|host| host.ssh.as_str()).collect::<Vec<_>>().join(" <-> ");
    let failed_here = |error: std::io::Error| Failure::new(&place, error.to_string(), "free space for temporary files");
    let mut path = tempfile::NamedTempFile::new().map_err(failed_here)?;
    path.write_all(file.to_json().to_string().as_bytes()).map_err(failed_here)?;

    let mut command = Command::new(program);
    command.args(["netbench", "--links", "--json", "--hostfile"]).arg(path.path()).args(flags);
    let pairs = u32::try_from(hosts.len() * hosts.len()).unwrap_or(u32::MAX);
    let patience = MEASURE_PATIENCE + LINK_PATIENCE.saturating_mul(pairs);
    let answer = run(command, patience).map_err(failed_here)?;
    #[derive(Deserialize)]
    struct Links {
        links: Vec<Link>,
    }
    match serde_json::from_str::<Links>(&answer.stdout) {
        Ok(Links { links }) if answer.succeeded() => Ok(links),
        _ => {
            let said = answer.last_error();
            let remedy = LINK_REMEDIES.iter().find(|(fragment, _)| said.contains(fragment));
            let remedy =
                remedy.map_or("run `consort netbench --links` between these hosts to see all that it says", |it| it.1);
            Err(Failure::new(&place, said, remedy))
        }
    }
}

/// What a program that was run to its end said.
struct Answer {
    /// None if it was ended because it took too long.
    status: Option<ExitStatus>,
    stdout: String,
    stderr: String,
    /// When its first line arrived.
    arrival: SystemTime,
}

impl Answer {
    fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Its error, or else the last line of its standard error.
    fn last_error(&self) -> String {
        let lines = || self.stderr.lines().map(str::trim).filter(|line| !line.is_empty()).rev();
        let error = lines().find_map(|line| line.strip_prefix("error: "));
        match (error.or_else(|| lines().next()), self.status) {
            (Some(line), _) => line.to_owned(),
            (None, Some(status)) => format!("it ended without a word ({status})"),
            (None, None) => "it took too long".to_owned(),
        }
    }
}

/// Runs a program to its end, or ends it when it takes too long.
fn run(mut command: Command, patience: Duration) -> std::io::Result<Answer> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let deadline = Instant::now() + patience;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let joined = |reader: Option<JoinHandle<_>>| reader.and_then(|reader| reader.join().ok());
    let (stdout, arrival) = joined(stdout).unwrap_or((String::new(), SystemTime::now()));
    let (stderr, _) = joined(stderr).unwrap_or((String::new(), arrival));
    Ok(Answer { status, stdout, stderr, arrival })
}

/// Reads a stream to its end in a thread of its own, and notes when the first line came.
fn read_all(stream: impl Read + Send + 'static) -> JoinHandle<(String, SystemTime)> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let mut stream = BufReader::new(stream);
        // What could not be read is missing from the answer, which is then explained as a failure.
        let _ = stream.read_until(b'\n', &mut bytes);
        let arrival = SystemTime::now();
        let _ = stream.read_to_end(&mut bytes);
        (String::from_utf8_lossy(&bytes).into_owned(), arrival)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(ssh: &str) -> Host {
        Host { ssh: ssh.to_owned(), slots: 1, ..Host::default() }
    }

    fn answered(change: impl FnOnce(&mut Visit)) -> Result<Visit, Failure> {
        let facts = HostFacts { version: "1".into(), ..HostFacts::default() };
        let mut visit = Visit { facts, clock_ahead_s: 0.0 };
        change(&mut visit);
        Ok(visit)
    }

    fn model(manifest_hash: Result<&str, &str>) -> Option<ModelFacts> {
        let manifest_hash = manifest_hash.map(str::to_owned).map_err(str::to_owned);
        Some(ModelFacts { name: "x".to_owned(), manifest_hash })
    }

    /// A stand-in for ssh that says `words` and fails as ssh does.
    fn told_by_ssh(words: &str) -> Failure {
        let mut command = Command::new("sh");
        command.args(["-c", "echo \"$1\" >&2; exit 255", "sh", words]);
        visit(&host("m2"), command).unwrap_err()
    }

    #[test]
    fn what_ssh_says_has_a_remedy() {
        for (words, expected) in [
            ("user@m2: Permission denied (publickey).", "ssh-copy-id m2"),
            ("ssh: connect to host m2 port 22: Connection refused", "start the ssh server on m2"),
            ("ssh: Could not resolve hostname m2: Name or service not known", "correct the name"),
            ("something new", "try ssh m2 by hand"),
        ] {
            let failure = told_by_ssh(words);
            assert!(failure.what.contains(words), "{failure:?}");
            assert!(failure.remedy.contains(expected), "{failure:?}");
        }
    }

    #[test]
    fn a_host_without_consort_is_told_apart() {
        let mut command = Command::new("sh");
        command.args(["-c", "exec /nowhere/consort"]);
        let failure = visit(&host("m2"), command).unwrap_err();
        assert!(failure.remedy.contains("install consort on m2"), "{failure:?}");
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let mut command = Command::new("sleep");
        command.arg("100");
        let begin = Instant::now();
        assert!(run(command, Duration::from_millis(100)).unwrap().status.is_none());
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn differences_between_hosts_are_named() {
        let hosts = ["m1", "m2", "m3", "m4", "m5"].map(host);
        let visits = [
            answered(|visit| visit.facts.model = model(Ok("a"))),
            answered(|visit| visit.facts.model = model(Ok("b"))),
            answered(|visit| visit.facts.model = model(Err("no such file"))),
            answered(|visit| (visit.facts.version, visit.facts.model) = ("2".to_owned(), model(Ok("a")))),
            answered(|visit| (visit.clock_ahead_s, visit.facts.model) = (-90.0, model(Ok("a")))),
        ];
        let failures = compare(&hosts, &visits, "1");
        let told: Vec<(&str, &str)> =
            failures.iter().map(|failure| (failure.place.as_str(), failure.what.as_str())).collect();
        assert_eq!(
            told,
            [
                ("m2", "its files of x are not those of m1"),
                ("m3", "the model cannot be used: no such file"),
                ("m4", "it has consort 2, this machine has 1"),
                ("m5", "its clock differs by -90 s"),
            ]
        );
    }

    #[test]
    fn memory_is_read_as_linux_writes_it() {
        let meminfo = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   15000000 kB\n";
        assert_eq!(available_in(meminfo), Some(15_360_000_000));
        assert_eq!(available_in("MemTotal: 1 kB\n"), None);
        assert!(installed_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
