//! The ways to write one quantized module into tensors, and the names of the tensors that tell them apart.

/// A way to write one quantized module into tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// E4M3 `weight` with `weight_scale` or `weight_scale_inv`.
    Fp8,
    /// `weight`, `weight_scale`, `weight_scale_2`, which multiplies.
    ModelOptNvFp4,
    /// `weight_packed`, `weight_scale`, `weight_global_scale`, which divides.
    CompressedNvFp4,
    /// `weight_packed`, `weight_scale`.
    CompressedMxFp4,
    /// `weight_packed`, `weight_scale`, perhaps `weight_zero_point` and `weight_g_idx`.
    CompressedIntegers,
    /// `blocks`, `scales` (gpt-oss).
    OssMxFp4,
    /// `weight`, `scales`, perhaps `biases` or `global_scale`.
    Mlx,
    /// `qweight`, `qzeros`, `scales`, perhaps `g_idx`.
    Gptq,
    /// `qweight`, `qzeros`, `scales`.
    Awq,
}

/// The parameters of a module, sorted, and what they spell; some spell one of several.
const SIGNATURES: &[(&[&str], Spelling)] = &[
    (&["weight", "weight_scale"], Spelling::Fp8),
    (&["weight", "weight_scale_inv"], Spelling::Fp8),
    (&["weight", "weight_scale", "weight_scale_2"], Spelling::ModelOptNvFp4),
    (&["weight_global_scale", "weight_packed", "weight_scale"], Spelling::CompressedNvFp4),
    (&["weight_packed", "weight_scale"], Spelling::CompressedMxFp4),
    (&["weight_packed", "weight_scale"], Spelling::CompressedIntegers),
    (&["weight_packed", "weight_scale", "weight_zero_point"], Spelling::CompressedIntegers),
    (&["weight_g_idx", "weight_packed", "weight_scale"], Spelling::CompressedIntegers),
    (&["weight_g_idx", "weight_packed", "weight_scale", "weight_zero_point"], Spelling::CompressedIntegers),
    (&["blocks", "scales"], Spelling::OssMxFp4),
    (&["scales", "weight"], Spelling::Mlx),
    (&["biases", "scales", "weight"], Spelling::Mlx),
    (&["global_scale", "scales", "weight"], Spelling::Mlx),
    (&["g_idx", "qweight", "qzeros", "scales"], Spelling::Gptq),
    (&["qweight", "qzeros", "scales"], Spelling::Gptq),
    (&["qweight", "qzeros", "scales"], Spelling::Awq),
];

/// What messages call them.
const NAMES: &[(Spelling, &str)] = &[
    (Spelling::Fp8, "FP8 with scales"),
    (Spelling::ModelOptNvFp4, "NVFP4 of ModelOpt"),
    (Spelling::CompressedNvFp4, "nvfp4-pack-quantized"),
    (Spelling::CompressedMxFp4, "mxfp4-pack-quantized"),
    (Spelling::CompressedIntegers, "pack-quantized"),
    (Spelling::OssMxFp4, "MXFP4 of gpt-oss"),
    (Spelling::Mlx, "MLX"),
    (Spelling::Gptq, "GPTQ"),
    (Spelling::Awq, "AWQ"),
];

impl std::fmt::Display for Spelling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAMES.iter().find(|(spelling, _)| spelling == self).map_or("?", |(_, name)| name))
    }
}

/// What these parameters (sorted) may spell.
pub(super) fn spelled_by(parameters: &[&str]) -> Vec<Spelling> {
    SIGNATURES.iter().filter(|(signature, _)| *signature == parameters).map(|(_, spelling)| *spelling).collect()
}

/// The parameters that a module with these (some of those that the spelling has) lacks to be spelled so: of the forms of a
/// spelling the one that lacks least. `None` where it has others.
pub(super) fn lacking(spelling: Spelling, parameters: &[&str]) -> Option<Vec<&'static str>> {
    let forms = SIGNATURES.iter().filter(|(_, of)| *of == spelling).map(|(form, _)| *form);
    let fitting = forms.filter(|form| parameters.iter().all(|name| form.contains(name)));
    let lacks = fitting.map(|form| form.iter().copied().filter(|name| !parameters.contains(name)).collect());
    lacks.min_by_key(Vec::len)
}
