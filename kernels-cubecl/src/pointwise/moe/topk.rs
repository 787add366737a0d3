//! Top-k: the experts of a token are those with the best scores, the first ones among equal scores.
//!
//! Scores are compared in fp64, in which the sum of two fp32 numbers is nearly always exact: a host that adds and
//! compares in fp64 selects the same experts. The result does not depend on how units cooperate.
use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a token.
const LANES: u32 = 8;
/// Most experts of a token, and most groups of experts: a cube holds that many for each token.
const MOST_PER_TOKEN: usize = 64;

/// How the experts of a token are selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Selection {
    /// Experts to choose from.
    pub experts: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Groups of neighbouring experts, of which the best are selected first; 1 without groups.
    pub groups: u32,
    /// Groups per token.
    pub top_groups: u32,
    /// Whether a bias is added to the scores.
    pub biased: bool,
}

impl Selection {
    /// Whether [`select_experts`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        let Self { experts, top_k, groups, top_groups, .. } = *self;
        let few = |count: u32| count >= 1 && count as usize <= MOST_PER_TOKEN;
        let grouped = few(groups) && experts.is_multiple_of(groups) && top_groups >= 1 && top_groups <= groups;
        few(top_k) && top_k <= experts && grouped && top_k <= experts / groups * top_groups
    }

    fn has_groups(&self) -> bool {
        self.top_groups < self.groups
    }
}

/// Units of a token.
fn lanes(cube: CubeShape) -> u32 {
    LANES.min(cube.units)
}

/// Tokens of a cube.
fn tokens_per_cube(cube: CubeShape) -> u32 {
    cube.units / lanes(cube)
}

/// Minus infinity for a NaN, for which every comparison is false.
#[cube]
fn ordered(value: f64) -> f64 {
    select(value >= f64::NEG_INFINITY, value, f64::NEG_INFINITY)
}

/// Whether `a` at index `at` ranks before `b` at index `other`.
#[cube]
fn is_before(a: f64, at: u32, b: f64, other: u32) -> bool {
    a > b || (a == b && at < other)
}

/// The score by which an expert of the row that begins at `row` is compared.
#[cube]
fn score_of(scores: &[f32], bias: &[f32], row: u32, expert: u32, #[comptime] selection: Selection) -> f64 {
    let mut score = f64::cast_from(scores[(row + expert) as usize]);
    if comptime![selection.biased] {
        score += f64::cast_from(bias[expert as usize]);
    }
    ordered(score)
}

/// Eight units take a token. In every round each of them finds the best of its experts that ranks after the last
/// selected one.
#[cube(launch_unchecked)]
pub fn topk_experts(
    scores: &[f32],
    bias: &[f32],
    choice: &mut [i32],
    tokens: u32,
    valid: u32,
    #[comptime] selection: Selection,
    #[comptime] cube: CubeShape,
) {
    let lanes = comptime![lanes(cube)];
    let cube_tokens = comptime![tokens_per_cube(cube)];
    let size = comptime![selection.experts / selection.groups];
    // Double-buffered, so that a round needs only one barrier of the cube.
    let mut best_scores = Shared::<[f64]>::new_slice(comptime![2 * cube.units as usize]);
    let mut best_experts = Shared::<[u32]>::new_slice(comptime![2 * cube.units as usize]);
    let mut selected = Shared::<[u32]>::new_slice(comptime![(cube_tokens * selection.top_k) as usize]);
    let mut totals = Shared::<[f64]>::new_slice(comptime![(cube_tokens * selection.groups) as usize]);
    let mut selected_groups = Shared::<[u32]>::new_slice(comptime![(cube_tokens * selection.groups) as usize]);
    let slot = UNIT_POS / lanes;
    let lane = UNIT_POS % lanes;
    let token = CUBE_POS_X * cube_tokens + slot;
    // Units without a token work on the last one, and write nothing.
    let row = min(token, tokens - 1) * comptime![selection.experts];
    if comptime![selection.has_groups()] {
        let mut group = lane;
        while group < comptime![selection.groups] {
            let mut first = f64::NEG_INFINITY.runtime();
            let mut second = f64::NEG_INFINITY.runtime();
            let mut expert = group * size;
            while expert < (group + 1) * size {
                let score = score_of(scores, bias, row, expert, selection);
                if score > first {
                    second = first;
                    first = score;
                } else if score > second {
                    second = score;
                }
                expert += 1;
            }
            let mut total = first;
            if comptime![size > 1] {
                total = ordered(first + second);
            }
            totals[(slot * comptime![selection.groups] + group) as usize] = total;
            group += lanes;
        }
        sync_cube();
        let mut group = lane;
        while group < comptime![selection.groups] {
            let total = totals[(slot * comptime![selection.groups] + group) as usize];
            let mut before = 0u32;
            let mut other = 0u32;
            while other < comptime![selection.groups] {
                let value = totals[(slot * comptime![selection.groups] + other) as usize];
                before += select(is_before(value, other, total, group), 1u32, 0u32);
                other += 1;
            }
            let is_selected = select(before < comptime![selection.top_groups], 1u32, 0u32);
            selected_groups[(slot * comptime![selection.groups] + group) as usize] = is_selected;
            group += lanes;
        }
        sync_cube();
    }
    let mut last = f64::INFINITY.runtime();
    let mut last_expert = 0u32;
    let mut round = 0u32;
    while round < comptime![selection.top_k] {
        let mut best = f64::NEG_INFINITY.runtime();
        let mut candidate = u32::MAX.runtime();
        let mut expert = lane;
        while expert < comptime![selection.experts] {
            let mut score = score_of(scores, bias, row, expert, selection);
            if comptime![selection.has_groups()] {
                let is_selected = selected_groups[(slot * comptime![selection.groups] + expert / size) as usize];
                score = select(is_selected == 1u32, score, f64::NEG_INFINITY);
            }
            let is_left = round == 0u32 || is_before(last, last_expert, score, expert);
            if is_left && is_before(score, expert, best, candidate) {
                best = score;
                candidate = expert;
            }
            expert += lanes;
        }
        let buffer_start = (round % 2) * comptime![cube.units];
        best_scores[(buffer_start + UNIT_POS) as usize] = best;
        best_experts[(buffer_start + UNIT_POS) as usize] = candidate;
        sync_cube();
        let mut other = 0u32;
        while other < lanes {
            let at = (buffer_start + slot * lanes + other) as usize;
            let (score, expert) = (best_scores[at], best_experts[at]);
            if is_before(score, expert, best, candidate) {
                best = score;
                candidate = expert;
            }
            other += 1;
        }
        last = best;
        last_expert = candidate;
        if lane == 0u32 {
            selected[(slot * comptime![selection.top_k] + round) as usize] = candidate;
        }
        round += 1;
    }
    sync_cube();
    let mut nth = lane;
    while nth < comptime![selection.top_k] {
        let first = slot * comptime![selection.top_k];
        let expert = selected[(first + nth) as usize];
        let mut smaller = 0u32;
        let mut other = 0u32;
        while other < comptime![selection.top_k] {
            smaller += select(selected[(first + other) as usize] < expert, 1u32, 0u32);
            other += 1;
        }
        if token < tokens {
            let to = (token * comptime![selection.top_k] + smaller) as usize;
            let to = select(token < valid, to, (token * comptime![selection.top_k] + nth) as usize);
            choice[to] = select(token < valid, expert as i32, -1);
        }
        nth += lanes;
    }
}

/// `choice [tokens, top_k]` (`i32`): the experts of the first `valid` tokens, ascending, and -1 for the other tokens,
/// by `scores [tokens, experts]`. With `selection.biased` a `bias [experts]` is added to the scores. With groups only
/// the experts of the best `top_groups` count, where the score of a group is the sum of its two best experts. Of equal
/// values the first one is better, a NaN is minus infinity. All fp32 without gaps.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too short.
pub fn select_experts(
    client: &Client,
    [scores, bias]: [&Handle; 2],
    choice: &Handle,
    [tokens, valid]: [usize; 2],
    selection: Selection,
) -> Result<(), PointwiseError> {
    let cube = CubeShape::of(client);
    let (experts, top_k) = (selection.experts as usize, selection.top_k as usize);
    if !selection.has_kernel() {
        return Err(PointwiseError::Length {
            what: "the choice",
            found: top_k,
            multiple: 1,
            most: experts.min(MOST_PER_TOKEN),
        });
    }
    check("tokens", tokens, 1, MOST / experts)?;
    check("tokens that count", valid + 1, 1, tokens + 1)?;
    let scores = buffer("scores", scores, tokens * experts, 4)?;
    let bias = buffer("bias", bias, if selection.biased { experts } else { 1 }, 4)?;
    let choice = buffer("choice", choice, tokens * top_k, 4)?;
    let count = CubeCount::Static((tokens as u32).div_ceil(tokens_per_cube(cube)), 1, 1);
    // SAFETY: every unit reads the row of a token and writes that of its own, and the buffers hold all rows.
    unsafe {
        launch_kernel!(topk_experts, client, count, cube.dim();
            scores, bias, choice; tokens as u32, valid as u32; selection, cube)
    };
    Ok(())
}

/// A unit for each token and expert.
#[cube(launch_unchecked)]
pub fn routing_mask(choice: &[i32], mask: &mut [i32], items: u32, #[comptime] experts: u32, #[comptime] top_k: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < items {
        let first = at / experts * top_k;
        let expert = (at % experts) as i32;
        let mut found = 0i32;
        let mut nth = 0u32;
        while nth < top_k {
            found = select(choice[(first + nth) as usize] == expert, 1i32, found);
            nth += 1;
        }
        mask[at as usize] = found;
    }
}

/// `mask [tokens, experts]` (`i32`) is 1 where `choice [tokens, top_k]` (`i32`) has the expert, else 0.
///
/// # Errors
/// If a buffer is too short, or there are more than 32 bits count.
pub fn mask(
    client: &Client,
    choice: &Handle,
    mask: &Handle,
    tokens: usize,
    [experts, top_k]: [usize; 2],
) -> Result<(), PointwiseError> {
    check("experts", experts, 1, MOST)?;
    check("tokens", tokens, 1, MOST / experts)?;
    check("experts per token", top_k, 1, experts)?;
    let cube = CubeShape::of(client);
    let (choice, mask) = (buffer("choice", choice, tokens * top_k, 4)?, buffer("mask", mask, tokens * experts, 4)?);
    let items = tokens * experts;
    // SAFETY: the buffers hold all tokens, and other units do nothing.
    unsafe {
        launch_kernel!(routing_mask, client, cube.line(items), cube.dim();
            choice, mask; items as u32; experts as u32, top_k as u32)
    };
    Ok(())
}
