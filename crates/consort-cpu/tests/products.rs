//! Products of every format against the definition: rows decoded one value at a time, and sums in f64.

mod common;

use common::{FORMATS, Random, activations, matrix};
use consort_compute::portable::HostBuffer;
use consort_compute::{Backend, Format, Matrix, RouteScore, RouteSpec};
use consort_cpu::isa::Isa;
use consort_cpu::{Activations, Cpu, CpuOptions};

/// Shapes that leave panels, chunks, blocks and register blocks incomplete: `(rows of x, output features, input features)`.
const SHAPES: &[(usize, usize, usize)] = &[
    (1, 1, 256),
    (1, 16, 32),
    (2, 17, 64),
    (3, 5, 300),
    (4, 33, 512),
    (5, 31, 257),
    (6, 48, 96),
    (7, 64, 1000),
    (8, 15, 768),
    (9, 130, 544),
    (16, 18, 800),
    (17, 32, 288),
    (33, 49, 352),
    (25, 40, 320),
    (200, 70, 290),
    (200, 530, 64),
];

fn cpu(isa: Isa, threads: usize, activations: Activations) -> Cpu {
    Cpu::new(CpuOptions {
        threads: Some(threads),
        unpinned: true,
        activations,
        isa: Some(isa),
        ..CpuOptions::default()
    })
    .unwrap()
}

/// What a product may differ by from the exact one.
#[derive(Clone, Copy)]
enum Bound {
    /// Rounding of f32 sums of this many products.
    Rounding,
    /// Also of activations: half a step of their block, times the weights.
    Int8,
    /// Also of activations: half of a unit in the last of bfloat16's 8 places.
    Bf16,
}

/// Every way in which activations enter products.
const ENTRIES: [Activations; 3] = [Activations::Exact, Activations::Int8, Activations::Bf16];

/// Compares `out[row][feature]` with the product of decoded row `feature_of(feature)` and `x[row]`.
fn check(out: &[f32], x: &HostBuffer, w: &Matrix<'_>, features: std::ops::Range<usize>, bound: Bound, what: &str) {
    let mut weights = vec![0.0; w.cols];
    for feature in features.clone() {
        w.decode_row(feature, &mut weights);
        for row in 0..x.rows() {
            let x = x.row(row);
            let exact: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let size: f64 = weights.iter().zip(x).map(|(w, x)| f64::from(*w * *x).abs()).sum();
            // Of whole numbers, groups and their biases are summed up apart: they may be larger than what they add up to.
            let mut allowed = size * f64::from(f32::EPSILON) * (8.0 + (w.cols as f64).sqrt()) + 1e-30;
            if let Bound::Bf16 = bound {
                allowed += size / 256.0;
            }
            if let Bound::Int8 = bound {
                for (weights, x) in weights.chunks(32).zip(x.chunks(32)) {
                    let step = x.iter().fold(0f32, |largest, x| largest.max(x.abs())) / 127.0;
                    let weights: f64 = weights.iter().map(|w| f64::from(w.abs())).sum();
                    // The inverse of the step is rounded, too.
                    allowed += f64::from(step) * 0.50001 * weights;
                }
            }
            let got = f64::from(out[row * features.len() + feature - features.start]);
            let error = (got - exact).abs();
            assert!(error <= allowed, "{what} [{row}, {feature}]: {got} is not {exact} ± {allowed:e}");
        }
    }
}

#[test]
fn every_format_on_every_instruction_set() {
    let mut random = Random(1);
    for isa in Isa::available() {
        for activation in ENTRIES {
            let cpu = cpu(isa, 2, activation);
            for &format in FORMATS {
                for &(n, rows, cols) in SHAPES {
                    let (w, x) = (matrix(&mut random, format, rows, cols), activations(&mut random, n, cols));
                    let weight = cpu.weight(w.clone());
                    let mut out = HostBuffer::with_capacity(n * rows);
                    cpu.matmul(&mut out, &x, &weight);
                    assert_eq!(out.shape(), (n, rows));
                    let bound = match activation.with(weight.layout(), isa) {
                        Activations::Int8 => Bound::Int8,
                        Activations::Bf16 => Bound::Bf16,
                        _ => Bound::Rounding,
                    };
                    check(
                        out.values(),
                        &x,
                        &w,
                        0..rows,
                        bound,
                        &format!("{isa} {activation:?} {format} {n}x{rows}x{cols}"),
                    );
                }
            }
        }
    }
}

/// Products in tiles split activations and scale sums of groups. That must not cost accuracy: against sums in f64, errors are no
/// larger than those of f32 sums in vectors.
#[test]
fn tiles_are_as_exact_as_vectors() {
    let [.., vectors, tiles] = Isa::available()[..] else { return };
    if tiles.name() != "amx" {
        return eprintln!("skipped: this machine has no tiles");
    }
    let (n, rows, cols) = (40, 64, 2048);
    for &format in FORMATS {
        let mut random = Random(7);
        let (w, x) = (matrix(&mut random, format, rows, cols), activations(&mut random, n, cols));
        let mut weights = vec![0.0; rows * cols];
        weights.chunks_exact_mut(cols).enumerate().for_each(|(row, weights)| w.decode_row(row, weights));
        let error = |isa: Isa| {
            let cpu = cpu(isa, 2, Activations::Exact);
            let mut out = HostBuffer::with_capacity(n * rows);
            cpu.matmul(&mut out, &x, &cpu.weight(w.clone()));
            let squares = (0..n * rows).map(|i| {
                let pairs = x.row(i / rows).iter().zip(&weights[i % rows * cols..][..cols]);
                let products = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w));
                let (exact, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x * x));
                (f64::from(out.values()[i]) - exact).powi(2) / size
            });
            (squares.sum::<f64>() / (n * rows) as f64).sqrt()
        };
        let (tiles, vectors) = (error(tiles), error(vectors));
        println!("{format}: tiles {tiles:.1e}, vectors {vectors:.1e}");
        assert!(tiles <= vectors, "{format}: tiles {tiles:e}, vectors {vectors:e}");
    }
}

/// Where weights have no scales, the processor's products of bfloat16 pairs give the bits of f32 products of the same rounded
/// activations, with which every vector set agrees. Tiles add in another order.
#[test]
fn vectors_agree_on_products_of_bfloat16() {
    let mut random = Random(8);
    for format in [Format::BF16, Format::F8E4M3] {
        for &(n, rows, cols) in SHAPES {
            let (w, x) = (matrix(&mut random, format, rows, cols), activations(&mut random, n, cols));
            let rounded: Vec<f32> = x.values().iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
            let rounded = HostBuffer::from_values(n, cols, &rounded);
            let product = |isa: Isa, activation: Activations, x: &HostBuffer| {
                let cpu = cpu(isa, 2, activation);
                let mut out = HostBuffer::with_capacity(n * rows);
                cpu.matmul(&mut out, x, &cpu.weight(w.clone()));
                out.values().to_vec()
            };
            let expected = product(Isa::named("portable").unwrap(), Activations::Exact, &rounded);
            for isa in Isa::available().into_iter().filter(|isa| !isa.has_tiles()) {
                let got = product(isa, Activations::Bf16, &x);
                assert_eq!(got, expected, "{isa} {format} {n}x{rows}x{cols}");
            }
        }
    }
}

/// With products of bfloat16, numbers below 2^-126 count as zero, activations or products; no others do.
#[test]
fn the_smallest_activations_in_bfloat16() {
    for isa in Isa::available() {
        let cpu = cpu(isa, 1, Activations::Bf16);
        for (x, w, product) in
            [(f32::MIN_POSITIVE, 4.0, 4.0 * f32::MIN_POSITIVE), (f32::MIN_POSITIVE, -1.0, -f32::MIN_POSITIVE)]
        {
            let w = Matrix::encode(Format::BF16, 1, 32, &[w; 32]);
            let mut values = [0.0; 32];
            values[9] = x;
            let mut out = HostBuffer::with_capacity(1);
            cpu.matmul(&mut out, &HostBuffer::from_values(1, 32, &values), &cpu.weight(w));
            assert_eq!(out.values(), [product], "{isa}");
        }
    }
}

#[test]
fn row_scales_multiply_rows() {
    let mut random = Random(2);
    for isa in Isa::available() {
        for &format in FORMATS {
            let cpu = cpu(isa, 2, Activations::Exact);
            let scales: Vec<f32> = (0..37).map(|_| random.value()).collect();
            let w = matrix(&mut random, format, 37, 320).with_row_scale(scales);
            let x = activations(&mut random, 3, 320);
            let mut out = HostBuffer::with_capacity(3 * 37);
            cpu.matmul(&mut out, &x, &cpu.weight(w.clone()));
            check(out.values(), &x, &w, 0..37, Bound::Rounding, &format!("{isa} {format}"));
        }
    }
}

#[test]
fn embedding_rows_are_decoded_exactly() {
    let mut random = Random(3);
    for isa in Isa::available() {
        let cpu = cpu(isa, 2, Activations::Auto);
        for &format in FORMATS {
            let w = matrix(&mut random, format, 37, 300);
            let tokens = [0, 36, 17, 17, 15, 16];
            let mut out = HostBuffer::with_capacity(tokens.len() * 300);
            cpu.embed(&mut out, &cpu.weight(w.clone()), &tokens);
            let mut row = vec![0.0; 300];
            for (i, &token) in tokens.iter().enumerate() {
                w.decode_row(token as usize, &mut row);
                assert_eq!(out.row(i), row, "{isa} {format}");
            }
        }
    }
}

#[test]
fn results_depend_on_neither_threads_nor_the_rest_of_the_batch() {
    let mut random = Random(4);
    for isa in Isa::available() {
        for activation in ENTRIES {
            let (one, three) = (cpu(isa, 1, activation), cpu(isa, 3, activation));
            for &format in FORMATS {
                let w = matrix(&mut random, format, 100, 550);
                let x = activations(&mut random, 29, 550);
                let (weight, mut together, mut again) =
                    (one.weight(w), HostBuffer::with_capacity(2900), HostBuffer::with_capacity(2900));
                one.matmul(&mut together, &x, &weight);
                three.matmul(&mut again, &x, &weight);
                assert_eq!(together.values(), again.values(), "{isa} {activation:?} {format}: threads");
                for row in 0..29 {
                    let alone = HostBuffer::from_values(1, 550, x.row(row));
                    one.matmul(&mut again, &alone, &weight);
                    assert_eq!(together.row(row), again.values(), "{isa} {activation:?} {format}: row {row}");
                }
            }
        }
    }
}

#[test]
fn experts_of_any_size() {
    let mut random = Random(5);
    for isa in Isa::available() {
        for (activation, &format) in
            [Activations::Exact, Activations::Bf16].iter().flat_map(|a| FORMATS.iter().map(move |f| (*a, f)))
        {
            let cpu = cpu(isa, 2, activation);
            for (tokens, features) in [(1, 16), (5, 24), (40, 7), (3, 1)] {
                let experts = 6;
                let w = matrix(&mut random, format, experts * features, 160);
                let weight = cpu.weight(w.clone());
                let rounded = activation.with(weight.layout(), isa) == Activations::Bf16;
                let bound = if rounded { Bound::Bf16 } else { Bound::Rounding };
                let logits = activations(&mut random, tokens, experts + 2);
                let mut routing = cpu.routing(tokens, 3);
                // Experts 1 to 6 of 8 are local.
                let spec = RouteSpec {
                    top_k: 3,
                    score: RouteScore::Softmax,
                    correction: None,
                    normalize_epsilon: None,
                    scale: 1.0,
                    local: 1..experts + 1,
                };
                cpu.route(&mut routing, &logits, &spec);
                for per_pair in [false, true] {
                    let rows = if per_pair { tokens * 3 } else { tokens };
                    let x = activations(&mut random, rows, 160);
                    let mut out = HostBuffer::with_capacity(tokens * 3 * features);
                    cpu.expert_matmul(&mut out, &x, &weight, &routing);
                    for pair in 0..tokens * 3 {
                        let x = HostBuffer::from_values(1, 160, x.row(if per_pair { pair } else { pair / 3 }));
                        match routing.local_expert(pair) {
                            None => assert!(out.row(pair).iter().all(|&x| x == 0.0)),
                            Some(expert) => check(
                                out.row(pair),
                                &x,
                                &w,
                                expert * features..(expert + 1) * features,
                                bound,
                                &format!("{isa} {activation:?} {format} expert {expert} of {features} features"),
                            ),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn damage_shows() {
    let mut random = Random(6);
    for isa in Isa::available() {
        for activation in ENTRIES {
            let cpu = cpu(isa, 1, activation);
            for &format in FORMATS {
                let weight = cpu.weight(matrix(&mut random, format, 20, 256));
                for damage in [f32::NAN, f32::INFINITY] {
                    let mut x = activations(&mut random, 1, 256);
                    x.values_mut()[77] = damage;
                    let mut out = HostBuffer::with_capacity(20);
                    cpu.matmul(&mut out, &x, &weight);
                    let shows = |x: &f32| !x.is_finite();
                    // A code of zero makes NaN of an infinity, too.
                    assert!(
                        out.values().iter().all(shows),
                        "{isa} {activation:?} {format}: {damage} in {:?}",
                        out.values()
                    );
                }
            }
        }
    }
}

/// Activations are prepared once for several products, but never for ones that have changed since.
#[test]
fn products_see_every_change_of_their_input() {
    let mut random = Random(7);
    for isa in Isa::available() {
        for activation in ENTRIES {
            let cpu = cpu(isa, 1, activation);
            let format = if activation == Activations::Bf16 { Format::BF16 } else { Format::Q8_0 };
            let weight = cpu.weight(matrix(&mut random, format, 32, 256));
            let product = |x: &HostBuffer| {
                let mut out = HostBuffer::with_capacity(x.rows() * 32);
                cpu.matmul(&mut out, x, &weight);
                out.values().to_vec()
            };
            let mut x = activations(&mut random, 4, 256);
            let (first, second) = (product(&x), product(&x));
            assert_eq!(first, second);
            let fresh = |x: &HostBuffer| HostBuffer::from_values(x.rows(), x.cols(), x.values());
            let mut copy = x.clone();
            cpu.scale(&mut x, 2.0);
            assert_eq!(product(&x), product(&fresh(&x)));
            assert_eq!(product(&copy), first);
            cpu.with_host(&mut copy, |values| values[3] = 5.0).unwrap();
            assert_eq!(product(&copy), product(&fresh(&copy)));
            copy.reshape(2, 256);
            assert_eq!(product(&copy), product(&fresh(&copy)));
            let other = fresh(&copy);
            cpu.add(&mut copy, &other);
            assert_eq!(product(&copy), product(&fresh(&copy)));
            assert_ne!(product(&copy), first[..64]);
        }
    }
}
