//! What a configuration declares about number formats.

use super::mlx::Mlx;
use super::modules::{Match, Modules};
use super::settings::Settings;
use super::spelling::{Spelling, lacking, spelled_by};
use super::{Module, compressed, integers};
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
    pub targets: Option<Modules>,
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
    /// All modules, and nothing else said.
    pub fn new(spelling: Spelling) -> Self {
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
            "compressed-tensors" => compressed::declare(&mut declared, &settings)?,
            "mxfp4" => declared.groups.push(Group::new(Spelling::OssMxFp4)),
            "gptq" => integers::gptq(&mut declared, &settings)?,
            "awq" => declared.groups.push(integers::awq_group(&settings)?),
            "auto-round" => integers::auto_round(&mut declared, &settings)?,
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
    pub fn leave_out(
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
pub(super) fn fixed_group(settings: &Settings<'_>, format: &str, group: Option<i64>) -> Result<(), CheckpointError> {
    match (settings.integer("group_size")?, group) {
        (Some(found), Some(group)) if found != group => {
            Err(settings.wrong("group_size", format!("is {found}, but groups of {format} have {group}")))
        }
        _ => Ok(()),
    }
}
