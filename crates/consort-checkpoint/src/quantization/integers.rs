//! What GPTQ, AWQ and AutoRound declare, which pack integers of 4 bits.

use super::declared::{Declared, Group, Strategy};
use super::settings::Settings;
use super::spelling::Spelling;
use crate::CheckpointError;
use crate::error::excerpt;

/// `packing_format` of AutoRound, and whose tensors it writes.
const AUTO_ROUND_PACKINGS: &[(&str, Spelling)] = &[
    ("auto_round:auto_gptq", Spelling::Gptq),
    ("auto_gptq", Spelling::Gptq),
    ("auto_round:auto_awq", Spelling::Awq),
    ("auto_awq", Spelling::Awq),
];
/// From this width on a module is in plain numbers.
const PLAIN_BITS: i64 = 16;

pub(super) fn gptq(declared: &mut Declared, settings: &Settings<'_>) -> Result<(), CheckpointError> {
    declared.groups.push(gptq_group(settings)?);
    declared.leave_out("dynamic", &left_out_by_rules(settings)?, settings)
}

/// AutoRound writes the tensors of other libraries. Settings of single modules that differ are those in plain numbers.
pub(super) fn auto_round(declared: &mut Declared, settings: &Settings<'_>) -> Result<(), CheckpointError> {
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
    declared.name = format!("auto-round {packing}");
    declared.groups.push(if *spelling == Spelling::Gptq { gptq_group(settings)? } else { awq_group(settings)? });
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
    declared.leave_out("extra_config", &plain, settings)
}

fn gptq_group(settings: &Settings<'_>) -> Result<Group, CheckpointError> {
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

pub(super) fn awq_group(settings: &Settings<'_>) -> Result<Group, CheckpointError> {
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
