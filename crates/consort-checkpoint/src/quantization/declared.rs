//! What a configuration declares about number formats.

use super::Module;
use super::mlx::Mlx;
use super::modules::{Match, Modules};
use super::settings::Settings;
use super::spelling::{Spelling, lacking, spelled_by};
use crate::CheckpointError;
use crate::error::excerpt;
use crate::huggingface::QuantizationBlock;

/// What `quantization_config` (or `quantization`, or `hf_quant_config.json`) says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Declared {
    /// For messages: `quant_method` and what specifies it.
    pub name: String,
    /// How modules may be stored; those in plain numbers always may be. Empty where nothing is declared.
    pub groups: Vec<Group>,
    /// Modules that are left in plain numbers, and the keys that list them.
    ignored: Vec<(&'static str, Modules)>,
    /// The key that lists what is quantized, if there is one.
    targets_key: &'static str,
    pub mlx: Option<Mlx>,
}

/// How some modules are stored. What the configuration leaves open the tensors decide.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub spelling: Spelling,
    /// `None`: all modules.
    targets: Option<Modules>,
    pub strategy: Option<Strategy>,
    /// Input features that share a scale.
    pub size: Option<usize>,
    /// Rows and columns of an FP8 scale block.
    pub fp8_block: Option<[usize; 2]>,
    /// FP8 scales in bytes are exponents.
    pub ue8m0: bool,
    /// Bits of the integers of compressed-tensors.
    pub bits: usize,
    /// Whether integers have no zero points, or all the same in the middle of the range (GPTQ).
    pub symmetric: bool,
    /// Whether input features are grouped in any order.
    pub any_order: bool,
    /// GPTQ stores zero points less this.
    pub zero_offset: u32,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    Tensor,
    /// A row; of GPTQ and AWQ all input features of an output.
    Channel,
    Group,
    /// A rectangle.
    Block,
    /// A group, whose scale shares another with the tensor.
    TensorGroup,
}

const STRATEGIES: &[(&str, Strategy)] = &[
    ("tensor", Strategy::Tensor),
    ("channel", Strategy::Channel),
    ("group", Strategy::Group),
    ("block", Strategy::Block),
    ("tensor_group", Strategy::TensorGroup),
];

/// A format of compressed-tensors that is read.
struct CompressedFormat {
    name: &'static str,
    spelling: Spelling,
    /// `type` and possible `num_bits` of the values.
    kind: &'static str,
    bits: &'static [i64],
    /// The one group that there is.
    group: Option<i64>,
    strategies: &'static [Strategy],
}

const COMPRESSED_FORMATS: &[CompressedFormat] = &[
    CompressedFormat {
        name: "float-quantized",
        spelling: Spelling::Fp8,
        kind: "float",
        bits: &[8],
        group: None,
        strategies: FP8_STRATEGIES,
    },
    CompressedFormat {
        name: "naive-quantized",
        spelling: Spelling::Fp8,
        kind: "float",
        bits: &[8],
        group: None,
        strategies: FP8_STRATEGIES,
    },
    CompressedFormat {
        name: "nvfp4-pack-quantized",
        spelling: Spelling::CompressedNvFp4,
        kind: "float",
        bits: &[4],
        group: Some(16),
        strategies: &[Strategy::TensorGroup, Strategy::Group],
    },
    CompressedFormat {
        name: "mxfp4-pack-quantized",
        spelling: Spelling::CompressedMxFp4,
        kind: "float",
        bits: &[4],
        group: Some(32),
        strategies: &[Strategy::Group],
    },
    CompressedFormat {
        name: "pack-quantized",
        spelling: Spelling::CompressedIntegers,
        kind: "int",
        bits: &[4, 8],
        group: None,
        strategies: &[Strategy::Group, Strategy::Channel, Strategy::Tensor],
    },
];

const FP8_STRATEGIES: &[Strategy] = &[Strategy::Tensor, Strategy::Channel, Strategy::Block];

/// `quant_algo` of ModelOpt, what may then occur, and the input features that share a scale.
const MODELOPT_ALGORITHMS: &[(&str, &[Spelling], Option<i64>)] = &[
    ("FP8", &[Spelling::Fp8], None),
    ("FP8_PER_CHANNEL_PER_TOKEN", &[Spelling::Fp8], None),
    ("NVFP4", &[Spelling::ModelOptNvFp4], Some(16)),
    ("MIXED_PRECISION", &[Spelling::Fp8, Spelling::ModelOptNvFp4], None),
];

/// Other words for a method: what is written, the method, and the algorithm of ModelOpt that it means.
const METHOD_ALIASES: &[(&str, &str, Option<&str>)] = &[
    ("compressed_tensors", "compressed-tensors", None),
    ("intel/auto-round", "auto-round", None),
    ("modelopt_fp4", "modelopt", Some("NVFP4")),
    ("modelopt_fp8", "modelopt", Some("FP8")),
    ("modelopt_mixed", "modelopt", Some("MIXED_PRECISION")),
];

/// `packing_format` of AutoRound, and whose tensors it writes.
const AUTO_ROUND_PACKINGS: &[(&str, Spelling)] = &[
    ("auto_round:auto_gptq", Spelling::Gptq),
    ("auto_gptq", Spelling::Gptq),
    ("auto_round:auto_awq", Spelling::Awq),
    ("auto_awq", Spelling::Awq),
];
/// From this width on a module is in plain numbers.
const PLAIN_BITS: i64 = 16;

/// Where quantizers list what they leave alone, by method.
const IGNORED_KEYS: &[(&str, &[&str])] = &[
    ("compressed-tensors", &["ignore"]),
    ("modelopt", &["ignore", "exclude_modules"]),
    ("fp8", &["modules_to_not_convert", "ignored_layers"]),
    ("mxfp4", &["modules_to_not_convert"]),
    ("awq", &["modules_to_not_convert"]),
    ("gptq", &["modules_to_not_convert"]),
];

impl Group {
    fn new(spelling: Spelling) -> Self {
        Self {
            spelling,
            targets: None,
            strategy: None,
            size: None,
            fp8_block: None,
            ue8m0: false,
            bits: 0,
            symmetric: true,
            any_order: false,
            zero_offset: 0,
        }
    }

    /// How these targets mean a module. Of classes the tensors know only that an embedding is no `Linear`.
    fn matches(&self, module: &Module<'_>) -> Result<Option<Match>, String> {
        let Some(targets) = &self.targets else { return Ok(Some(Match::Class)) };
        if let Some((how, _)) = targets.entry(module)? {
            return Ok(Some(how));
        }
        let embeds = module.name.ends_with("embed_tokens");
        let of_its_class = |class: &String| (class == "Embedding") == embeds;
        Ok(targets.classes.iter().any(of_its_class).then_some(Match::Class))
    }
}

impl Declared {
    /// Understands a quantization block; no block declares plain numbers.
    ///
    /// # Errors
    /// [`CheckpointError::Config`] for an unknown method, format, mode or number of bits, and for a value of a wrong type.
    pub fn parse(block: Option<&QuantizationBlock>) -> Result<Self, CheckpointError> {
        let Some(block) = block else {
            return Ok(Self { name: "no quantization_config".into(), ..Self::default() });
        };
        let outer = Settings::new(block)?;
        // `hf_quant_config.json` nests its settings beside its producer's name.
        let settings = outer.inner("quantization")?.unwrap_or(outer);
        let written = match settings.text("quant_method")? {
            Some(method) => method.to_ascii_lowercase(),
            None if settings.text("quant_algo")?.is_some() => "modelopt".into(),
            None if settings.inner("config_groups")?.is_some() => "compressed-tensors".into(),
            None if settings.integer("bits")?.is_some() || settings.text("mode")?.is_some() => "mlx".into(),
            None => return Err(settings.wrong("", "has neither quant_method nor bits")),
        };
        let alias = METHOD_ALIASES.iter().find(|(alias, ..)| *alias == written);
        let (method, implied) = alias.map_or((written.as_str(), None), |&(_, method, algorithm)| (method, algorithm));
        let mut declared = Self { name: method.into(), targets_key: "config_groups", ..Self::default() };
        match method {
            "fp8" => declared.groups.push(fp8(&settings)?),
            "modelopt" => declared.modelopt(&settings, implied)?,
            "compressed-tensors" => declared.compressed_tensors(&settings)?,
            "mxfp4" => declared.groups.push(Group::new(Spelling::OssMxFp4)),
            "gptq" => {
                declared.groups.push(gptq(&settings)?);
                declared.leave_out("dynamic", &left_out_by_rules(&settings)?, &settings)?;
            }
            "awq" => declared.groups.push(awq(&settings)?),
            "auto-round" => declared.auto_round(&settings)?,
            "mlx" => {
                let mlx = Mlx::parse(&settings)?;
                declared.name = format!("mlx {}", mlx.defaults);
                declared.groups.push(Group::new(Spelling::Mlx));
                declared.mlx = Some(mlx);
            }
            other => {
                return Err(settings.wrong("quant_method", format!("{:?} is not supported", excerpt(other))));
            }
        }
        for &key in IGNORED_KEYS.iter().filter(|(of, _)| *of == method).flat_map(|(_, keys)| *keys) {
            declared.leave_out(key, &settings.texts(key)?, &settings)?;
        }
        Ok(declared)
    }

    /// Takes down modules that stay in plain numbers.
    fn leave_out(
        &mut self,
        key: &'static str,
        entries: &[impl AsRef<str>],
        settings: &Settings<'_>,
    ) -> Result<(), CheckpointError> {
        if !entries.is_empty() {
            self.ignored.push((key, Modules::new(entries).map_err(|reason| settings.wrong(key, reason))?));
        }
        Ok(())
    }

    fn modelopt(&mut self, settings: &Settings<'_>, implied: Option<&str>) -> Result<(), CheckpointError> {
        let algorithm = settings.text("quant_algo")?.or(implied).unwrap_or("");
        if let Some(implied) = implied.filter(|implied| *implied != algorithm) {
            return Err(settings.wrong("quant_algo", format!("is {:?}, not {implied}", excerpt(algorithm))));
        }
        let (spellings, group) = modelopt_algorithm(settings, algorithm)?;
        self.name = format!("modelopt {algorithm}");
        self.groups = spellings.iter().map(|&spelling| Group::new(spelling)).collect();
        fixed_group(settings, algorithm, group)?;
        if let Some(layers) = settings.inner("quantized_layers")? {
            self.layers_of_modelopt(&layers)?;
        }
        let groups = settings.inner("config_groups")?;
        for (key, _) in groups.iter().flat_map(Settings::members) {
            let group_settings = groups.as_ref().and_then(|groups| groups.inner(key).transpose()).transpose()?;
            if let Some(weights) = group_settings.map(|of| of.inner("weights")).transpose()?.flatten() {
                fixed_group(&weights, algorithm, group)?;
            }
        }
        Ok(())
    }

    /// An algorithm for each layer, where they differ.
    fn layers_of_modelopt(&mut self, layers: &Settings<'_>) -> Result<(), CheckpointError> {
        self.targets_key = "quantized_layers";
        for group in &mut self.groups {
            let mut names = Vec::new();
            for (name, _) in layers.members() {
                let Some(layer) = layers.inner(name)? else { continue };
                let algorithm = layer.text("quant_algo")?.unwrap_or("");
                let (spellings, size) = modelopt_algorithm(&layer, algorithm)?;
                fixed_group(&layer, algorithm, size)?;
                names.extend((spellings == [group.spelling]).then_some(name));
            }
            group.targets = Some(Modules::new(&names).map_err(|reason| layers.wrong("", reason))?);
        }
        Ok(())
    }

    /// AutoRound writes the tensors of other libraries. Settings of single modules that differ are those in plain numbers.
    fn auto_round(&mut self, settings: &Settings<'_>) -> Result<(), CheckpointError> {
        const PACKING: &str = "packing_format";
        let packing = settings.text(PACKING)?.unwrap_or("");
        let known = AUTO_ROUND_PACKINGS.iter().find(|(known, _)| *known == packing);
        let unknown = || {
            let reason = format!("{:?} of auto-round is not supported; auto_gptq and auto_awq are", excerpt(packing));
            settings.wrong(PACKING, reason)
        };
        let (_, spelling) = known.ok_or_else(unknown)?;
        if let Some(kind) = settings.text("data_type")?.filter(|kind| *kind != "int") {
            return Err(settings.wrong("data_type", format!("{:?} is not supported; int is", excerpt(kind))));
        }
        self.name = format!("auto-round {packing}");
        self.groups.push(if *spelling == Spelling::Gptq { gptq(settings)? } else { awq(settings)? });
        let mut plain = Vec::new();
        if let Some(modules) = settings.inner("extra_config")? {
            for (name, _) in modules.members() {
                let Some(own) = modules.inner(name)? else { continue };
                match own.integer("bits")? {
                    Some(bits) if bits >= PLAIN_BITS => plain.push(name),
                    _ => same_settings(&own, settings)?,
                }
            }
        }
        self.leave_out("extra_config", &plain, settings)
    }

    fn compressed_tensors(&mut self, settings: &Settings<'_>) -> Result<(), CheckpointError> {
        no_transforms(settings)?;
        let sparsity = settings.inner("sparsity_config")?;
        if let Some(of) = &sparsity
            && let Some(format) = of.text("format")?.filter(|format| *format != "dense")
        {
            return Err(of.wrong("format", format!("{:?} is not supported; dense is", excerpt(format))));
        }
        let whole = settings.text("format")?;
        let mut names: Vec<&str> = Vec::new();
        if let Some(groups) = settings.inner("config_groups")? {
            for (key, _) in groups.members() {
                let Some(of) = groups.inner(key)? else { continue };
                // A group may speak of activations alone.
                let Some(weights) = of.inner("weights")? else { continue };
                let format = of.text("format")?.or(whole);
                let Some(format) = format else { return Err(of.wrong("format", "is missing")) };
                let mut group = compressed_group(&weights, known_format(&of, format)?)?;
                let targets = of.texts("targets")?;
                if !targets.is_empty() {
                    group.targets = Some(Modules::new(&targets).map_err(|reason| of.wrong("targets", reason))?);
                }
                names.push(format);
                self.groups.push(group);
            }
        }
        if self.groups.is_empty() {
            let Some(format) = whole else { return Err(settings.wrong("", "compressed-tensors without a format")) };
            let known = known_format(settings, format)?;
            if known.spelling == Spelling::CompressedIntegers {
                return Err(settings.wrong("config_groups", "is missing; it says how many bits the integers have"));
            }
            self.groups.push(Group::new(known.spelling));
            names.push(format);
        }
        names.dedup();
        self.name = format!("compressed-tensors {}", names.join(", "));
        Ok(())
    }

    /// Whether a module is one that is to stay in plain numbers.
    pub fn leaves_out(&self, module: &Module<'_>) -> bool {
        let listed = |(_, list): &(_, Modules)| list.entry(module).is_ok_and(|entry| entry.is_some());
        self.ignored.iter().any(listed) || self.mlx.as_ref().is_some_and(|mlx| mlx.of(&module.name).is_none())
    }

    /// The spelling that a list of single modules demands of this one by its name.
    pub fn demanded(&self, module: &Module<'_>) -> Option<(Spelling, &'static str)> {
        let mut lists = self.groups.iter().filter_map(|group| Some((group.spelling, group.targets.as_ref()?)));
        let own = |&(_, list): &(Spelling, &Modules)| self.targets_key == "quantized_layers" && list.names(module);
        lists.find(own).map(|(spelling, _)| (spelling, self.targets_key))
    }

    /// How a module with these parameters (sorted) is stored.
    ///
    /// # Errors
    /// What is not declared, or contradicts what is.
    pub fn settle(&self, module: &Module<'_>, parameters: &[&str]) -> Result<&Group, String> {
        let candidates = spelled_by(parameters);
        let has = parameters.join(", ");
        if candidates.is_empty() {
            let lacks =
                self.groups.iter().find_map(|group| lacking(group.spelling, parameters).map(|lacks| (group, lacks)));
            return Err(match lacks {
                Some((group, lacks)) => format!("has {has}, but {} needs {} too", group.spelling, lacks.join(", ")),
                None => format!("has {has}, which no known scheme has together"),
            });
        }
        let found = candidates.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
        if self.groups.is_empty() {
            return Err(format!(
                "has {has} ({found}), which no quantization_config declares; get the config.json of these files"
            ));
        }
        for (key, list) in &self.ignored {
            if let Some((_, entry)) = list.entry(module)? {
                return Err(format!("is quantized ({has}), but {key} leaves it out as {:?}", excerpt(entry)));
            }
        }
        let mut matching: Vec<(Match, &Group)> = Vec::new();
        for group in &self.groups {
            matching.extend(group.matches(module)?.map(|how| (how, group)));
        }
        let Some(best) = matching.iter().map(|(how, _)| *how).min() else {
            return Err(format!("is quantized ({has}), but no targets of {} mean it", self.targets_key));
        };
        let mut meant = matching.iter().filter(|(how, _)| *how == best).map(|(_, group)| *group);
        let first = meant.clone().next().map(|group| group.spelling);
        meant.find(|group| candidates.contains(&group.spelling)).ok_or_else(|| {
            let lacks = first.and_then(|spelling| Some((spelling, lacking(spelling, parameters)?)));
            match lacks {
                Some((spelling, lacks)) => format!("has {has}, but {spelling} needs {} too", lacks.join(", ")),
                None => format!("is stored as {found} ({has}), which is not declared"),
            }
        })
    }
}

fn fp8(settings: &Settings<'_>) -> Result<Group, CheckpointError> {
    let known = |key: &str, values: &[&str], what: &str| match settings.text(key)? {
        Some(found) if !values.contains(&found) => {
            Err(settings.wrong(key, format!("{:?} is not supported; {what}", excerpt(found))))
        }
        found => Ok(found),
    };
    known("fmt", &["e4m3", "float8_e4m3fn"], "e4m3 is")?;
    let scales = known("scale_fmt", &["ue8m0", "float", "float32"], "ue8m0 and float are")?;
    let fp8_block = settings.block("weight_block_size")?;
    Ok(Group { fp8_block, ue8m0: scales == Some("ue8m0"), ..Group::new(Spelling::Fp8) })
}

fn gptq(settings: &Settings<'_>) -> Result<Group, CheckpointError> {
    let mut version = 1;
    for key in ["checkpoint_format", "format"] {
        version = match settings.text(key)? {
            None => version,
            Some("gptq") => 1,
            Some("gptq_v2") => 2,
            Some(other) => {
                let reason = format!("{:?} is not supported; gptq and gptq_v2 are", excerpt(other));
                return Err(settings.wrong(key, reason));
            }
        };
    }
    if settings.flag("is_marlin_format")? == Some(true) {
        return Err(settings.wrong("is_marlin_format", "is not supported; get the checkpoint in the format gptq"));
    }
    if let Some(word) = settings.text("pack_dtype")?.filter(|word| *word != "int32") {
        return Err(settings.wrong("pack_dtype", format!("{:?} is not supported; int32 is", excerpt(word))));
    }
    let any_order = settings.flag("desc_act")?.unwrap_or(false);
    let symmetric = settings.flag("sym")?.unwrap_or(false);
    Ok(Group { any_order, symmetric, zero_offset: u32::from(version == 1), ..packed(settings, Spelling::Gptq)? })
}

/// What the rules of GPTQModel leave out, as expressions; a rule with settings of its own must repeat those of the model.
fn left_out_by_rules(settings: &Settings<'_>) -> Result<Vec<String>, CheckpointError> {
    let Some(rules) = settings.inner("dynamic")? else { return Ok(Vec::new()) };
    let mut left_out = Vec::new();
    for (rule, _) in rules.members() {
        match (rule.strip_prefix("-:"), rules.inner(rule)?) {
            (Some(expression), _) => left_out.push(format!("re:{expression}")),
            (None, Some(own)) => same_settings(&own, settings)?,
            (None, None) => {}
        }
    }
    Ok(left_out)
}

/// Settings of single modules beside those of all.
fn same_settings(own: &Settings<'_>, all: &Settings<'_>) -> Result<(), CheckpointError> {
    match ["bits", "group_size", "sym", "desc_act", "data_type"].into_iter().find(|key| own.differs(all, key)) {
        Some(key) => Err(own.wrong(key, "differs from that of the model, which is not supported")),
        None => Ok(()),
    }
}

fn awq(settings: &Settings<'_>) -> Result<Group, CheckpointError> {
    if let Some(version) = settings.text("version")?.filter(|version| !version.eq_ignore_ascii_case("gemm")) {
        return Err(settings.wrong("version", format!("{:?} of awq is not supported; gemm is", excerpt(version))));
    }
    if settings.flag("zero_point")? == Some(false) {
        return Err(settings.wrong("zero_point", "is false, but awq is read with its zero points (qzeros)"));
    }
    Ok(Group { symmetric: false, ..packed(settings, Spelling::Awq)? })
}

/// What GPTQ and AWQ have in common.
fn packed(settings: &Settings<'_>, spelling: Spelling) -> Result<Group, CheckpointError> {
    match settings.integer_of(["bits", "w_bit"])? {
        Some(4) => {}
        Some(bits) => {
            return Err(settings.wrong("bits", format!("{spelling} of {bits} bits is not supported; 4 bits are")));
        }
        None => return Err(settings.wrong("bits", "is missing")),
    }
    let (strategy, size) = match settings.integer_of(["group_size", "q_group_size"])?.unwrap_or(128) {
        -1 => (Strategy::Channel, None),
        size if size > 0 => (Strategy::Group, Some(size as usize)),
        size => return Err(settings.wrong("group_size", format!("{spelling} in groups of {size} is not supported"))),
    };
    Ok(Group { strategy: Some(strategy), size, ..Group::new(spelling) })
}

/// Rotations that are folded into weights need nothing more; those of activations would have to be done while the model runs.
fn no_transforms(settings: &Settings<'_>) -> Result<(), CheckpointError> {
    let transforms = settings.inner("transform_config")?;
    let Some(groups) = transforms.map(|of| of.inner("config_groups")).transpose()?.flatten() else { return Ok(()) };
    let applied = groups.members().flat_map(|(_, scheme)| scheme["apply"].as_array().into_iter().flatten());
    let mut places = applied.map(|entry| entry["location"].as_str().unwrap_or("?"));
    match places.find(|place| !place.starts_with("weight_")) {
        Some(place) => {
            let reason = format!("transforms {:?} while the model runs, which is not supported", excerpt(place));
            Err(settings.wrong("transform_config", reason))
        }
        None => Ok(()),
    }
}

fn known_format(settings: &Settings<'_>, format: &str) -> Result<&'static CompressedFormat, CheckpointError> {
    COMPRESSED_FORMATS.iter().find(|known| known.name == format).ok_or_else(|| {
        settings.wrong("format", format!("{:?} of compressed-tensors is not supported", excerpt(format)))
    })
}

/// How an algorithm of ModelOpt may spell a module, and the input features that share a scale.
fn modelopt_algorithm(
    settings: &Settings<'_>,
    algorithm: &str,
) -> Result<(&'static [Spelling], Option<i64>), CheckpointError> {
    let known = MODELOPT_ALGORITHMS.iter().find(|(known, ..)| *known == algorithm);
    known
        .map(|(_, spellings, group)| (*spellings, *group))
        .ok_or_else(|| settings.wrong("quant_algo", format!("{:?} of modelopt is not supported", excerpt(algorithm))))
}

/// A format whose groups have one size: a configuration that names another means something else.
fn fixed_group(settings: &Settings<'_>, format: &str, group: Option<i64>) -> Result<(), CheckpointError> {
    match (settings.integer("group_size")?, group) {
        (Some(found), Some(group)) if found != group => {
            Err(settings.wrong("group_size", format!("is {found}, but groups of {format} have {group}")))
        }
        _ => Ok(()),
    }
}

/// The `weights` of an entry of `config_groups`.
fn compressed_group(weights: &Settings<'_>, format: &CompressedFormat) -> Result<Group, CheckpointError> {
    let name = format.name;
    let kind = weights.text("type")?.unwrap_or(format.kind);
    let bits = match (weights.integer("num_bits")?, format.bits) {
        (Some(bits), _) => bits,
        (None, [only]) => *only,
        (None, _) => return Err(weights.wrong("num_bits", "is missing")),
    };
    if kind != format.kind || !format.bits.contains(&bits) {
        return Err(weights.wrong("num_bits", format!("{name} of {}{bits} is not supported", excerpt(kind))));
    }
    fixed_group(weights, name, format.group)?;
    let size = weights.integer("group_size")?.filter(|&size| size != -1);
    let strategy = match weights.text("strategy")? {
        Some(text) => {
            let known = STRATEGIES.iter().find(|(known, _)| *known == text).map(|(_, strategy)| *strategy);
            let unknown = || weights.wrong("strategy", format!("{:?} is not supported", excerpt(text)));
            Some(known.ok_or_else(unknown)?)
        }
        // What the library makes of a group alone.
        None => size.map(|_| Strategy::Group),
    };
    let grouped = matches!(strategy, Some(Strategy::Group | Strategy::TensorGroup));
    match size {
        Some(size) if size <= 0 => return Err(weights.wrong("group_size", format!("is {size}"))),
        Some(size) if !grouped && strategy.is_some() && format.group.is_none() => {
            return Err(weights.wrong("group_size", format!("is {size}, but the strategy has no groups")));
        }
        None if strategy == Some(Strategy::Group) && format.group.is_none() => {
            return Err(weights.wrong("group_size", "is missing, but the strategy is group"));
        }
        _ => {}
    }
    if let (Some(strategy), Some(text)) = (strategy, weights.text("strategy")?)
        && !format.strategies.contains(&strategy)
    {
        return Err(weights.wrong("strategy", format!("is {text:?}, which {name} does not have")));
    }
    let fp8_block = weights.block("block_structure")?;
    if (strategy == Some(Strategy::Block)) != fp8_block.is_some() && strategy.is_some() {
        return Err(weights.wrong("block_structure", "belongs to the strategy block, and to no other"));
    }
    let symmetric = weights.flag("symmetric")?.unwrap_or(true);
    if !symmetric && format.kind == "float" {
        return Err(weights.wrong("symmetric", format!("is false, but {name} has no zero points")));
    }
    // Older writers put a flag where newer ones put a text.
    let any_order = match weights.flag("actorder") {
        Ok(flag) => flag.unwrap_or(false),
        Err(_) => match weights.text("actorder")? {
            Some("group" | "dynamic") => true,
            None | Some("weight" | "static") => false,
            Some(other) => return Err(weights.wrong("actorder", format!("{:?} is not supported", excerpt(other)))),
        },
    };
    Ok(Group {
        strategy,
        size: size.map(|size| size as usize),
        fp8_block,
        bits: bits as usize,
        symmetric,
        any_order,
        ..Group::new(format.spelling)
    })
}
