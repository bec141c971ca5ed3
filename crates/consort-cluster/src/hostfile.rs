//! The hostfile: which machines a run may use, in JACCL's JSON with a few fields of our own beside it.
//!
//! ```json
//! { "backend": "jaccl",
//!   "envs": ["NAME=value"],
//!   "hosts": [ {"ssh": "m1", "ips": ["192.168.1.1"], "rdma": [null, "rdma_en5"], "slots": 1, "memory": "64GB"},
//!              {"ssh": "m2", "ips": ["192.168.1.2"], "rdma": ["rdma_en5", null], "user": "user", "port": 2222} ] }
//! ```
//!
//! `consort doctor --write` adds what it measured: `"links": [null, {"latency_ns": 9000, "bytes_per_s": 1100000000}]`, one entry per
//! host as for `rdma`.
//!
//! A bare list of hosts is accepted too. Only `ssh` is required. The file is walked by hand rather than deserialized, so that
//! every complaint can name the entry and the field, and so that a misspelt field is reported rather than lost.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::ClusterError;

/// The machines of a run, in rank order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hostfile {
    /// MLX's name for a transport (`ring`, `jaccl`, …), where the file has one.
    pub backend: Option<String>,
    /// Environment for every rank, as `(name, value)`.
    pub environment: Vec<(String, String)>,
    /// The machines; never empty.
    pub hosts: Vec<Host>,
    /// What the file holds that has no meaning here, one line each, for the user to see.
    pub warnings: Vec<String>,
}

/// One machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// The name that ssh reaches it by: `m1` or `user@m1`.
    pub ssh: String,
    /// Its addresses for data, the one to listen on first.
    pub ips: Vec<IpAddr>,
    /// For each host of the file, the RDMA devices that lead to it; empty when the file says nothing about RDMA.
    pub rdma: Vec<Vec<Device>>,
    /// The user to log in as, where ssh's own configuration does not say.
    pub user: Option<String>,
    /// The ssh port, where ssh's own configuration does not say.
    pub port: Option<u16>,
    /// Memory that a run may use on it.
    pub memory_bytes: Option<u64>,
    /// How many ranks it takes; at least 1.
    pub slots: usize,
    /// The directory on it that models are in.
    pub weights: Option<PathBuf>,
    /// The `consort` executable on it, where that is not the launcher's own path.
    pub executable: Option<PathBuf>,
    /// For each host of the file, how fast the link to it was when it was measured; empty when nobody did.
    pub links: Vec<Option<LinkSpeed>>,
}

/// How fast data goes from one host to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpeed {
    /// Half of a round trip of a small message.
    pub latency_ns: u64,
    /// Bytes per second of large messages, over all rails.
    pub bytes_per_s: u64,
}

impl Host {
    /// Whether its ranks are started without ssh.
    pub fn is_this_machine(&self) -> bool {
        let is_loopback = self.ssh.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        (self.ssh == "localhost" || is_loopback) && self.user.is_none() && self.port.is_none()
    }
}

/// The name of an RDMA device, such as `rdma_en5` or `mlx5_0`.
pub type Device = String;

const FILE_FIELDS: &[&str] = &["backend", "envs", "hosts"];
const HOST_FIELDS: &[&str] =
    &["ssh", "ips", "rdma", "user", "port", "memory", "memory_bytes", "slots", "weights", "executable", "links"];

/// Something wrong in one place of the file: `(place, problem)`.
type Complaint = (String, String);

impl Hostfile {
    /// Reads and checks a hostfile.
    ///
    /// # Errors
    /// The file is unreadable, not JSON, or an entry cannot be used; the message names the entry and the field.
    pub fn read(path: &Path) -> Result<Self, ClusterError> {
        let io = |error| ClusterError::HostfileIo { path: path.to_owned(), error };
        // A pipe or a device would be waited for, or read, without end.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(io(std::io::Error::other("not a regular file")));
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        Self::parse(&text).map_err(|(place, problem)| ClusterError::Hostfile { path: path.to_owned(), place, problem })
    }

    /// The file of `slots` ranks on this machine alone.
    pub fn local(slots: usize) -> Self {
        let localhost = Host { ssh: "localhost".to_owned(), slots, ..Host::default() };
        Self { hosts: vec![localhost], ..Self::default() }
    }

    /// Ranks that all hosts take together.
    pub fn slots(&self) -> usize {
        self.hosts.iter().map(|host| host.slots).sum()
    }

    /// The same hosts, some of them only, in the given order.
    pub fn subset(&self, hosts: &[usize]) -> Self {
        fn pick<T: Clone>(list: &[T], hosts: &[usize]) -> Vec<T> {
            hosts.iter().filter_map(|&host| list.get(host).cloned()).collect()
        }
        let host = |host: Host| Host { rdma: pick(&host.rdma, hosts), links: pick(&host.links, hosts), ..host };
        Self { hosts: pick(&self.hosts, hosts).into_iter().map(host).collect(), ..self.clone() }
    }

    /// The file as [`Hostfile::read`] reads it.
    pub fn to_json(&self) -> Value {
        let environment: Vec<String> = self.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let fields = [
            ("backend", self.backend.as_ref().map(|backend| json!(backend))),
            ("envs", (!environment.is_empty()).then(|| json!(environment))),
            ("hosts", Some(self.hosts.iter().map(Host::to_json).collect())),
        ];
        present(fields)
    }

    fn parse(text: &str) -> Result<Self, Complaint> {
        let value: Value = serde_json::from_str(text).map_err(|error| ("JSON".to_owned(), error.to_string()))?;
        let mut file = Self::default();
        let hosts = match &value {
            Value::Array(hosts) => hosts,
            Value::Object(fields) => {
                file.warn_of_unknown(fields, FILE_FIELDS, "file");
                file.backend = text_field(fields, "backend").map_err(|problem| at("file", "backend", problem))?;
                file.environment = environment(fields).map_err(|problem| at("file", "envs", problem))?;
                fields
                    .get("hosts")
                    .and_then(Value::as_array)
                    .ok_or_else(|| at("file", "hosts", "expected a list of hosts".to_owned()))?
            }
            _ => {
                return Err((
                    "file".to_owned(),
                    "expected a list of hosts, or an object with the field \"hosts\"".to_owned(),
                ));
            }
        };
        if hosts.is_empty() {
            return Err(at("file", "hosts", "the list is empty".to_owned()));
        }
        for (index, entry) in hosts.iter().enumerate() {
            let name = entry.get("ssh").and_then(Value::as_str).map(|ssh| format!(" ({ssh})")).unwrap_or_default();
            let place = format!("host {index}{name}");
            let fields = entry.as_object().ok_or_else(|| (place.clone(), "expected an object".to_owned()))?;
            file.warn_of_unknown(fields, HOST_FIELDS, &place);
            let host = host(fields, index, hosts.len()).map_err(|(field, problem)| at(&place, field, problem))?;
            file.hosts.push(host);
        }
        Ok(file)
    }

    fn warn_of_unknown(&mut self, fields: &Map<String, Value>, known: &[&str], place: &str) {
        for name in fields.keys().filter(|name| !known.contains(&name.as_str())) {
            self.warnings.push(format!("{place}: unknown field \"{name}\" ignored (known: {})", known.join(", ")));
        }
    }
}

impl Host {
    fn to_json(&self) -> Value {
        let links = self.links.iter().map(|speed| match speed {
            None => Value::Null,
            Some(LinkSpeed { latency_ns, bytes_per_s }) => {
                json!({"latency_ns": latency_ns, "bytes_per_s": bytes_per_s})
            }
        });
        let path = |path: &PathBuf| json!(path.display().to_string());
        present([
            ("ssh", Some(json!(self.ssh))),
            ("ips", (!self.ips.is_empty()).then(|| json!(self.ips))),
            ("rdma", (!self.rdma.is_empty()).then(|| devices_to_json(&self.rdma))),
            ("user", self.user.as_ref().map(|user| json!(user))),
            ("port", self.port.map(|port| json!(port))),
            ("memory_bytes", self.memory_bytes.map(|bytes| json!(bytes))),
            ("slots", (self.slots != 1).then(|| json!(self.slots))),
            ("weights", self.weights.as_ref().map(path)),
            ("executable", self.executable.as_ref().map(path)),
            ("links", (!self.links.is_empty()).then(|| links.collect())),
        ])
    }
}

/// An object of the fields that have a value.
fn present<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect::<Map<_, _>>().into()
}

fn at(place: &str, field: &str, problem: String) -> Complaint {
    (format!("{place}, field \"{field}\""), problem)
}

/// Reads one entry of the list. An error is `(field, problem)`.
fn host(fields: &Map<String, Value>, index: usize, hosts: usize) -> Result<Host, (&'static str, String)> {
    fn in_field<T>(field: &'static str, result: Result<T, String>) -> Result<T, (&'static str, String)> {
        result.map_err(|problem| (field, problem))
    }
    let ssh = in_field("ssh", text_field(fields, "ssh"))?.ok_or_else(|| ("ssh", "missing".to_owned()))?;
    in_field("ssh", check_login(&ssh))?;
    let user = in_field("user", text_field(fields, "user"))?;
    in_field("user", user.as_deref().map_or(Ok(()), check_login))?;
    let memory_text = in_field("memory", text_field(fields, "memory"))?;
    let memory_text_bytes = in_field("memory", memory_text.as_deref().map(parse_size).transpose())?;
    let memory_bytes = in_field("memory_bytes", whole_number(fields, "memory_bytes", u64::MAX))?;
    if memory_bytes.is_some() && memory_text_bytes.is_some() {
        return Err(("memory", "give either \"memory\" or \"memory_bytes\", not both".to_owned()));
    }
    Ok(Host {
        ips: in_field("ips", ips(fields))?,
        rdma: in_field("rdma", rdma(fields, index, hosts))?,
        port: in_field("port", whole_number(fields, "port", u64::from(u16::MAX)))?.map(|port| port as u16),
        memory_bytes: memory_bytes.or(memory_text_bytes),
        slots: in_field("slots", whole_number(fields, "slots", 1024))?.map_or(1, |slots| slots as usize),
        weights: in_field("weights", text_field(fields, "weights"))?.map(PathBuf::from),
        executable: in_field("executable", text_field(fields, "executable"))?.map(PathBuf::from),
        links: in_field("links", links(fields, hosts))?,
        ssh,
        user,
    })
}

/// A login name ends up on ssh's command line, where a leading `-` would make it an option.
fn check_login(name: &str) -> Result<(), String> {
    if name.starts_with('-') {
        return Err(format!("\"{name}\" begins with '-', which ssh would take for an option"));
    }
    match name.chars().find(|c| c.is_whitespace() || c.is_control()) {
        Some(c) => Err(format!("the character {c:?} cannot be part of a name")),
        None if name.is_empty() => Err("the name is empty".to_owned()),
        None => Ok(()),
    }
}

fn text_field(fields: &Map<String, Value>, name: &str) -> Result<Option<String>, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(format!("expected text, got {other}")),
    }
}

fn whole_number(fields: &Map<String, Value>, name: &str, most: u64) -> Result<Option<u64>, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) if (1..=most).contains(&number) => Ok(Some(number)),
            _ if most == u64::MAX => Err(format!("expected a whole number of at least 1, got {value}")),
            _ => Err(format!("expected a whole number from 1 to {most}, got {value}")),
        },
    }
}

fn list_field<'a>(fields: &'a Map<String, Value>, name: &str) -> Result<&'a [Value], String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => Err(format!("expected a list, got {other}")),
    }
}

fn ips(fields: &Map<String, Value>) -> Result<Vec<IpAddr>, String> {
    list_field(fields, "ips")?
        .iter()
        .map(|ip| ip.as_str().and_then(|ip| ip.parse().ok()).ok_or_else(|| format!("{ip} is not an IP address")))
        .collect()
}

/// A list of RDMA devices as JACCL writes it: for each peer `null`, a name, or a list of names.
///
/// # Errors
/// What was expected, as a clause.
pub(crate) fn devices_from_json(list: &Value) -> Result<Vec<Vec<Device>>, String> {
    let device = |value: &Value| -> Result<Device, String> {
        value.as_str().map(str::to_owned).ok_or_else(|| format!("expected a device name, got {value}"))
    };
    let list = list.as_array().ok_or_else(|| format!("expected a list, got {list}"))?;
    list.iter()
        .map(|link| match link {
            Value::Null => Ok(Vec::new()),
            Value::Array(devices) => devices.iter().map(device).collect(),
            one => Ok(vec![device(one)?]),
        })
        .collect()
}

/// The same list again.
pub(crate) fn devices_to_json(list: &[Vec<Device>]) -> Value {
    let devices = |devices: &Vec<Device>| match devices.as_slice() {
        [] => Value::Null,
        [device] => json!(device),
        devices => json!(devices),
    };
    list.iter().map(devices).collect()
}

fn rdma(fields: &Map<String, Value>, index: usize, hosts: usize) -> Result<Vec<Vec<Device>>, String> {
    list_field(fields, "rdma")?;
    let links = fields.get("rdma").filter(|list| !list.is_null()).map_or(Ok(Vec::new()), devices_from_json)?;
    if links.is_empty() {
        return Ok(links);
    }
    if links.len() != hosts {
        return Err(format!("expected one entry per host ({hosts}), got {}", links.len()));
    }
    if !links[index].is_empty() {
        return Err(format!("entry {index} is the way from this host to itself and must be null"));
    }
    Ok(links)
}

fn environment(fields: &Map<String, Value>) -> Result<Vec<(String, String)>, String> {
    list_field(fields, "envs")?
        .iter()
        .map(|entry| entry.as_str().ok_or_else(|| format!("expected \"NAME=value\", got {entry}")).and_then(assignment))
        .collect()
}

/// Splits `NAME=value`.
///
/// # Errors
/// There is no `=`, or the name is not letters, digits and `_`; it becomes part of a shell command.
pub fn assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if is_variable_name(name) => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("expected NAME=value with a name of letters, digits and _, got \"{text}\"")),
    }
}

fn links(fields: &Map<String, Value>, hosts: usize) -> Result<Vec<Option<LinkSpeed>>, String> {
    let entries = list_field(fields, "links")?;
    if !entries.is_empty() && entries.len() != hosts {
        return Err(format!("expected one entry per host ({hosts}), got {}", entries.len()));
    }
    let speed = |entry: &Value| {
        let number = |name: &str| entry.get(name).and_then(Value::as_u64);
        match (entry, number("latency_ns"), number("bytes_per_s")) {
            (Value::Null, ..) => Ok(None),
            (_, Some(latency_ns), Some(bytes_per_s)) => Ok(Some(LinkSpeed { latency_ns, bytes_per_s })),
            _ => Err(format!("expected null, or \"latency_ns\" and \"bytes_per_s\" as whole numbers, got {entry}")),
        }
    };
    entries.iter().map(speed).collect()
}

/// Whether a shell takes `name` for a variable's name, so that it needs no quotes.
pub(crate) fn is_variable_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Reads a size such as `64GB`, `1.5 TiB` or `800000000`.
///
/// # Errors
/// What was expected, as a clause.
pub fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: &[(&str, f64)] = &[
        ("", 1.0),
        ("B", 1.0),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
        ("KiB", 1024.0),
        ("MiB", 1048576.0),
        ("GiB", 1073741824.0),
        ("TiB", 1099511627776.0),
    ];
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit.trim())).map(|(_, scale)| scale);
    match (number.parse::<f64>(), scale) {
        (Ok(number), Some(scale)) if number > 0.0 => Ok((number * scale) as u64),
        _ => Err(format!("expected a size such as \"64GB\" or \"64GiB\", got \"{text}\"")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(text: &str) -> String {
        let (place, problem) = Hostfile::parse(text).expect_err(text);
        format!("{place}: {problem}")
    }

    #[test]
    fn a_jaccl_hostfile_is_read_unchanged() {
        let file = Hostfile::parse(
            r#"{"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1", "EMPTY="],
                "hosts": [{"ssh": "m1", "ips": ["192.168.1.1"], "rdma": [null, "rdma_en5", ["rdma_en4", "rdma_en3"]]},
                          {"ssh": "m2", "ips": ["fd00::2"], "rdma": ["rdma_en5", null, null]},
                          {"ssh": "user@m3", "ips": [], "rdma": [["rdma_en4", "rdma_en3"], null, null]}]}"#,
        )
        .unwrap();
        assert_eq!(file.backend.as_deref(), Some("jaccl"));
        assert_eq!(file.environment[0], ("MLX_METAL_FAST_SYNCH".to_owned(), "1".to_owned()));
        assert_eq!(file.environment[1], ("EMPTY".to_owned(), String::new()));
        assert_eq!(file.hosts.len(), 3);
        assert_eq!(
            file.hosts[0].rdma,
            [vec![], vec!["rdma_en5".to_owned()], vec!["rdma_en4".into(), "rdma_en3".into()]]
        );
        assert_eq!(file.hosts[1].ips, ["fd00::2".parse::<IpAddr>().unwrap()]);
        assert_eq!((file.slots(), file.warnings.len()), (3, 0));
    }

    #[test]
    fn a_bare_list_with_our_own_fields() {
        let file = Hostfile::parse(
            r#"[{"ssh": "m1", "slots": 2, "memory": "1.5 GiB", "user": "user", "port": 2222, "weights": "/models"},
                {"ssh": "m2", "memory_bytes": 64000000000, "executable": "/opt/consort"}]"#,
        )
        .unwrap();
        let [first, second] = file.hosts.as_slice() else { panic!() };
        assert_eq!((first.slots, first.memory_bytes, first.port), (2, Some(1_610_612_736), Some(2222)));
        assert_eq!((first.user.as_deref(), first.weights.as_deref()), (Some("user"), Some(Path::new("/models"))));
        assert_eq!((second.slots, second.memory_bytes), (1, Some(64_000_000_000)));
        assert_eq!(file.slots(), 3);
    }

    #[test]
    fn complaints_name_the_entry_and_the_field() {
        for (text, expected) in [
            (r#"{"hosts": ["#, "JSON: EOF"),
            ("3", "file: expected a list of hosts"),
            ("{}", r#"file, field "hosts": expected a list"#),
            ("[]", r#"file, field "hosts": the list is empty"#),
            (r#"["m1"]"#, "host 0: expected an object"),
            (r#"[{"ssh": "m1"}, {"ips": []}]"#, r#"host 1, field "ssh": missing"#),
            (r#"[{"ssh": 4}]"#, r#"host 0, field "ssh": expected text, got 4"#),
            (
                r#"[{"ssh": "-oProxyCommand=x"}]"#,
                r#"host 0 (-oProxyCommand=x), field "ssh": "-oProxyCommand=x" begins with '-'"#,
            ),
            (r#"[{"ssh": "m1", "user": "-l"}]"#, r#"host 0 (m1), field "user": "-l" begins with '-'"#),
            (r#"[{"ssh": "m1 m2"}]"#, r#"host 0 (m1 m2), field "ssh": the character ' '"#),
            (r#"[{"ssh": ""}]"#, r#"host 0 (), field "ssh": the name is empty"#),
            (r#"[{"ssh": "m1", "ips": ["m1.local"]}]"#, r#"host 0 (m1), field "ips": "m1.local" is not an IP address"#),
            (
                r#"[{"ssh": "m1", "slots": 0}]"#,
                r#"host 0 (m1), field "slots": expected a whole number from 1 to 1024, got 0"#,
            ),
            (r#"[{"ssh": "m1", "port": 65536}]"#, r#"field "port": expected a whole number from 1 to 65535"#),
            (r#"[{"ssh": "m1", "memory": "lots"}]"#, r#"field "memory": expected a size"#),
            (r#"[{"ssh": "m1", "memory": "1GB", "memory_bytes": 1}]"#, r#"field "memory": give either"#),
            (
                r#"[{"ssh": "m1", "memory_bytes": -1}]"#,
                r#"field "memory_bytes": expected a whole number of at least 1"#,
            ),
            (r#"[{"ssh": "m1", "rdma": [null, "a"]}]"#, r#"field "rdma": expected one entry per host (1), got 2"#),
            (r#"[{"ssh": "m1", "links": [null, null]}]"#, r#"field "links": expected one entry per host (1), got 2"#),
            (r#"[{"ssh": "m1", "links": [{"latency_ns": 1}]}]"#, r#"field "links": expected null, or "latency_ns""#),
            (r#"[{"ssh": "m1", "rdma": ["a"]}]"#, r#"field "rdma": entry 0 is the way from this host to itself"#),
            (r#"[{"ssh": "m1", "rdma": [[3]]}]"#, r#"field "rdma": expected a device name, got 3"#),
            (r#"{"envs": ["A-B=1"], "hosts": [{"ssh": "m1"}]}"#, r#"file, field "envs": expected NAME=value"#),
            (r#"{"envs": ["A"], "hosts": [{"ssh": "m1"}]}"#, r#"file, field "envs": expected NAME=value"#),
        ] {
            let complaint = complaint(text);
            assert!(complaint.contains(expected), "{text}\n  said: {complaint}\n  expected: {expected}");
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let text = r#"{"backend": "jaccl", "envs": ["A=1"], "hosts": [
            {"ssh": "m1", "ips": ["10.0.0.1", "fd00::1"], "rdma": [null, "a", ["b", "c"]], "user": "user", "port": 2222,
             "memory_bytes": 64000000000, "slots": 2, "weights": "/models", "executable": "/opt/consort",
             "links": [null, {"latency_ns": 9000, "bytes_per_s": 1100000000}, null]},
            {"ssh": "m2"}, {"ssh": "m3"}]}"#;
        let file = Hostfile::parse(text).unwrap();
        assert_eq!(file.hosts[0].links[1], Some(LinkSpeed { latency_ns: 9000, bytes_per_s: 1_100_000_000 }));
        assert_eq!(Hostfile::parse(&file.to_json().to_string()).unwrap(), file);
        let subset = file.subset(&[0, 2]);
        assert_eq!(subset.hosts.iter().map(|host| host.ssh.as_str()).collect::<Vec<_>>(), ["m1", "m3"]);
        assert_eq!(subset.hosts[0].rdma, [vec![], vec!["b".to_owned(), "c".to_owned()]]);
        assert_eq!(Hostfile::parse(&subset.to_json().to_string()).unwrap(), subset);
    }

    #[test]
    fn a_misspelt_field_is_reported() {
        let file = Hostfile::parse(r#"{"host": 1, "hosts": [{"ssh": "m1", "slot": 2}]}"#).unwrap();
        assert_eq!(file.warnings.len(), 2);
        assert!(file.warnings[1].starts_with("host 0 (m1): unknown field \"slot\" ignored"), "{:?}", file.warnings);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Hostfile::read(Path::new("/nowhere/hosts.json")).unwrap_err().to_string();
        assert!(error.starts_with("hostfile /nowhere/hosts.json: "), "{error}");
    }
}
