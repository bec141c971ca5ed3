//! Advanced Matrix Extensions: eight tiles of 16 rows by 64 bytes, and products of whole tiles (Sapphire Rapids and later).
//!
//! The intrinsics are not stable in Rust, so this module speaks to the tiles in assembly. A block of assembly leaves nothing in
//! a tile that a later one needs, only their configuration stays, and [`Amx::run`] releases it: a thread that is not inside a
//! product has no tiles for the system to save when it switches threads.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use super::{Avx512, LANES, Quads};

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;

/// The products of 16 rows and 16 lanes.
pub type Products<T> = [[T; LANES]; TILE_ROWS];

/// Proof that processor and system let this process use tiles, with products of bytes and of bfloat16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx {
    vectors: Avx512,
}

/// A computation with tiles.
pub trait TileKernel {
    /// Does it; [`Kernel::run`](super::Kernel::run) says how implementations are marked.
    fn run(self, tiles: &mut Tiles, simd: Avx512);
}

impl Amx {
    /// The proof, if there are tiles.
    pub fn detect() -> Option<Self> {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        let vectors = Avx512::detect()?;
        let permitted =
            *PERMITTED.get_or_init(|| has_tiles() && is_x86_feature_detected!("avx512vbmi") && permit_tiles());
        permitted.then_some(Self { vectors })
    }

    /// The vector instructions that come with them.
    pub fn vectors(self) -> Avx512 {
        self.vectors
    }

    /// Runs a kernel, and releases the tiles.
    pub fn run(self, kernel: impl TileKernel) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c")]
        fn enter(amx: Amx, kernel: impl TileKernel) {
            kernel.run(&mut Tiles { rows: 0, bytes: 0, not_sent: std::marker::PhantomData }, amx.vectors);
        }
        // SAFETY: `self` proves that the processor has the features.
        unsafe { enter(self, kernel) }
    }
}

/// Whether the processor has tiles, and products of bytes and bfloat16 (CPUID leaf 7, EDX).
fn has_tiles() -> bool {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    __cpuid_count(7, 0).edx & BF16_TILE_INT8 == BF16_TILE_INT8
}

/// Asks the system for the right to use tiles, whose state it must save (Linux 5.16 and later).
#[cfg(target_os = "linux")]
fn permit_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes what the process is permitted to do.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permit_tiles() -> bool {
    false
}

/// The configuration of a tile register file: `palette` 1 has eight tiles.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tiles of a thread: 0 to 3 hold sums, 4 to 6 activations, 7 weights.
///
/// Weights lie as [`Quads`], one for each row of a tile: four bytes, or two bfloat16 numbers, of each of 16 lanes.
pub struct Tiles {
    rows: usize,
    bytes: usize,
    /// Tiles belong to the thread that configured them.
    not_sent: std::marker::PhantomData<*const ()>,
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: whoever made `self` proved that there are tiles, and nothing in them is needed any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

impl Tiles {
    /// Sets tiles up for `rows` rows of activations and groups of `bytes` bytes of each row.
    ///
    /// # Panics
    /// When a tile is smaller.
    #[inline(always)]
    pub fn shape(&mut self, rows: usize, bytes: usize) {
        if (self.rows, self.bytes) == (rows, bytes) {
            return;
        }
        assert!((1..=TILE_ROWS).contains(&rows) && [16, 32, 64].contains(&bytes), "{rows} rows of {bytes} bytes");
        (self.rows, self.bytes) = (rows, bytes);
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            let activations = (4..7).contains(&tile);
            configuration.row_bytes[tile] = if activations { bytes as u16 } else { 64 };
            configuration.rows[tile] = if tile == 7 { bytes / 4 } else { rows } as u8;
        }
        // SAFETY: whoever made `self` proved that there are tiles; the configuration is a valid one, of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) };
    }

    /// Multiplies whole tiles `4 · rounds` times, of bytes or of bfloat16, and forgets the products: what a processor can do.
    #[inline(always)]
    pub fn multiply_only(&mut self, rounds: usize, bf16: bool) {
        self.shape(TILE_ROWS, 64);
        macro_rules! multiply {
            ($product:literal) => {
                asm!(
                    "tilezero tmm4",
                    "tilezero tmm5",
                    "tilezero tmm7",
                    "2:",
                    concat!($product, " tmm0, tmm4, tmm7"),
                    concat!($product, " tmm1, tmm5, tmm7"),
                    concat!($product, " tmm2, tmm4, tmm7"),
                    concat!($product, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) rounds.max(1) => _,
                    options(nostack, nomem)
                )
            };
        }
        // SAFETY: only tiles change, which hold nothing that is needed.
        unsafe {
            if bf16 {
                multiply!("tdpbf16ps");
            } else {
                multiply!("tdpbssd");
            }
        }
    }

    /// Products of each of `pairs` pairs of groups of signed bytes, with signed bytes of weights, or unsigned ones if
    /// `UNSIGNED`. Meanwhile memory is asked for `ahead`.
    ///
    /// # Safety
    /// From `x` on, every `stride` bytes, lie as many rows of so many groups as the tiles have.
    #[inline(always)]
    pub unsafe fn dot_bytes<const UNSIGNED: bool>(
        &mut self,
        pairs: usize,
        x: *const u8,
        stride: usize,
        w: &[Quads],
        ahead: &[u8],
        out: &mut [Products<i32>],
    ) {
        self.check(pairs, w.len(), out.len());
        let (ahead, share) = shares(ahead, pairs);
        macro_rules! multiply {
            ($product:literal) => {
                asm!(
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tileloadd tmm7, [{w} + {line}]",
                    "tileloadd tmm4, [{x} + {stride}]",
                    concat!($product, " tmm0, tmm4, tmm7"),
                    "add {x}, {group}",
                    "add {w}, {group_weights}",
                    "tileloadd tmm7, [{w} + {line}]",
                    "tileloadd tmm5, [{x} + {stride}]",
                    concat!($product, " tmm1, tmm5, tmm7"),
                    "add {x}, {group}",
                    "add {w}, {group_weights}",
                    "tilestored [{out} + {line}], tmm0",
                    "tilestored [{out} + {line} + 1024], tmm1",
                    "add {out}, 2048",
                    "add {until}, {share}",
                    "3:",
                    "cmp {ahead}, {until}",
                    "jae 4f",
                    "prefetcht0 [{ahead}]",
                    "add {ahead}, 64",
                    "jmp 3b",
                    "4:",
                    "dec {pairs}",
                    "jnz 2b",
                    pairs = inout(reg) pairs => _,
                    w = inout(reg) w.as_ptr() => _,
                    x = inout(reg) x => _,
                    out = inout(reg) out.as_mut_ptr() => _,
                    ahead = inout(reg) ahead => _,
                    until = inout(reg) ahead => _,
                    share = in(reg) share,
                    group = in(reg) self.bytes,
                    group_weights = in(reg) 16 * self.bytes,
                    stride = in(reg) stride,
                    line = in(reg) 64usize,
                    options(nostack)
                )
            };
        }
        // SAFETY: the rows of `x` by the caller's promise, the weights and tiles of 1024 bytes as was just checked.
        unsafe {
            if UNSIGNED {
                multiply!("tdpbsud");
            } else {
                multiply!("tdpbssd");
            }
        }
    }

    /// Products of each of `pairs` pairs of groups of bfloat16, each the sum of three products with parts of activations, the
    /// smallest part first. Meanwhile memory is asked for `ahead`.
    ///
    /// # Safety
    /// From `x` on, every `stride` bytes, lie as many rows as the tiles have, and in each, every `PART_BYTES`, three parts of so
    /// many groups.
    #[inline(always)]
    pub unsafe fn dot_split<const PART_BYTES: usize>(
        &mut self,
        pairs: usize,
        x: *const u8,
        stride: usize,
        w: &[Quads],
        ahead: &[u8],
        out: &mut [Products<f32>],
    ) {
        self.check(pairs, w.len(), out.len());
        let (ahead, share) = shares(ahead, pairs);
        // SAFETY: as in `dot_bytes`.
        unsafe {
            asm!(
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm7, [{w} + {line}]",
                "tileloadd tmm4, [{x} + {stride} + 2 * {part}]",
                "tdpbf16ps tmm0, tmm4, tmm7",
                "tileloadd tmm5, [{x} + {stride} + {part}]",
                "tdpbf16ps tmm0, tmm5, tmm7",
                "tileloadd tmm6, [{x} + {stride}]",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "add {x}, {group}",
                "add {w}, {group_weights}",
                "tileloadd tmm7, [{w} + {line}]",
                "tileloadd tmm4, [{x} + {stride} + 2 * {part}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{x} + {stride} + {part}]",
                "tdpbf16ps tmm1, tmm5, tmm7",
                "tileloadd tmm6, [{x} + {stride}]",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "add {x}, {group}",
                "add {w}, {group_weights}",
                "tilestored [{out} + {line}], tmm0",
                "tilestored [{out} + {line} + 1024], tmm1",
                "add {out}, 2048",
                "add {until}, {share}",
                "3:",
                "cmp {ahead}, {until}",
                "jae 4f",
                "prefetcht0 [{ahead}]",
                "add {ahead}, 64",
                "jmp 3b",
                "4:",
                "dec {pairs}",
                "jnz 2b",
                pairs = inout(reg) pairs => _,
                w = inout(reg) w.as_ptr() => _,
                x = inout(reg) x => _,
                out = inout(reg) out.as_mut_ptr() => _,
                ahead = inout(reg) ahead => _,
                until = inout(reg) ahead => _,
                share = in(reg) share,
                group = in(reg) self.bytes,
                group_weights = in(reg) 16 * self.bytes,
                stride = in(reg) stride,
                line = in(reg) 64usize,
                part = const PART_BYTES,
                options(nostack)
            );
        }
    }

    /// Whether there are weights and room for pairs of groups.
    #[inline(always)]
    fn check(&self, pairs: usize, weights: usize, products: usize) {
        assert!(pairs > 0 && weights >= pairs * self.bytes / 2 && products >= 2 * pairs, "{pairs} pairs of groups");
    }

    /// Adds to the sums of four panels the products of `steps` groups of bfloat16 with three parts of activations each, the
    /// smallest part first. Panels lie `WEIGHT_BYTES` apart in `w`. Meanwhile memory is asked for `ahead`, and for as many bytes
    /// of the three panels that follow every `panel_bytes`.
    ///
    /// # Safety
    /// Rows of `x` are as for [`dot_split`](Self::dot_split), with `steps` groups, and `w` has as many groups of four panels.
    #[inline(always)]
    pub unsafe fn accumulate<const PART_BYTES: usize, const WEIGHT_BYTES: usize>(
        &mut self,
        steps: usize,
        x: *const u8,
        stride: usize,
        w: *const Quads,
        (ahead, panel_bytes): (&[u8], usize),
        sums: &mut [[[f32; LANES]; 4]],
    ) {
        assert!(self.bytes == 64 && steps > 0 && sums.len() >= self.rows, "whole tiles, and sums of their rows");
        let (ahead, share) = shares(ahead, steps);
        // SAFETY: by the caller's promise; asking for memory that is not there does nothing.
        unsafe {
            asm!(
                "tileloadd tmm0, [{sums} + {row}]",
                "tileloadd tmm1, [{sums} + {row} + 64]",
                "tileloadd tmm2, [{sums} + {row} + 128]",
                "tileloadd tmm3, [{sums} + {row} + 192]",
                "2:",
                "tileloadd tmm4, [{x} + {stride} + 2 * {part}]",
                "tileloadd tmm5, [{x} + {stride} + {part}]",
                "tileloadd tmm6, [{x} + {stride}]",
                "tileloadd tmm7, [{w} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm7",
                "tdpbf16ps tmm0, tmm5, tmm7",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "tileloadd tmm7, [{w} + {line} + {weight}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm1, tmm5, tmm7",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "tileloadd tmm7, [{w} + {line} + 2 * {weight}]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm7",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tileloadd tmm7, [{w} + {line} + 3 * {weight}]",
                "tdpbf16ps tmm3, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tdpbf16ps tmm3, tmm6, tmm7",
                "add {x}, 64",
                "add {w}, 1024",
                "add {until}, {share}",
                "3:",
                "cmp {ahead}, {until}",
                "jae 4f",
                "prefetcht0 [{ahead}]",
                "prefetcht0 [{ahead} + {panel}]",
                "prefetcht0 [{ahead} + 2 * {panel}]",
                "prefetcht0 [{ahead} + {three_panels}]",
                "add {ahead}, 64",
                "jmp 3b",
                "4:",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {row}], tmm0",
                "tilestored [{sums} + {row} + 64], tmm1",
                "tilestored [{sums} + {row} + 128], tmm2",
                "tilestored [{sums} + {row} + 192], tmm3",
                steps = inout(reg) steps => _,
                ahead = inout(reg) ahead => _,
                until = inout(reg) ahead => _,
                share = in(reg) share,
                panel = in(reg) panel_bytes,
                three_panels = in(reg) 3 * panel_bytes,
                w = inout(reg) w => _,
                x = inout(reg) x => _,
                stride = in(reg) stride,
                line = in(reg) 64usize,
                sums = in(reg) sums.as_mut_ptr(),
                row = in(reg) size_of_val(&sums[0]),
                part = const PART_BYTES,
                weight = const WEIGHT_BYTES,
                options(nostack)
            );
        }
    }
}

/// The start of what memory is asked for, and how many bytes of it with each of `pairs`.
#[inline(always)]
fn shares(ahead: &[u8], pairs: usize) -> (*const u8, usize) {
    (ahead.as_ptr(), ahead.len() / pairs)
}
