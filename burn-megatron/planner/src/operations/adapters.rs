//! Adapters of linear layers next to frozen weights (`models/src/lora/layers.rs`, `models/src/lora/experts.rs`).

use std::collections::BTreeSet;

use kernels_cubecl::blockwise::Format;
use layouts::sizes::EXPERT_WIDTH;

use super::{Activation, Chain, Op};

/// Adapters of the linear layers of a decoder, the same in every layer of a kind; all other parameters are frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adapters {
    /// Rank.
    pub rank: u64,
    /// There is a magnitude for every output.
    pub dora: bool,
    /// Of queries, keys and values the A that each reads, if it has an adapter: outputs that a file fuses read one.
    pub qkv: [Option<usize>; 3],
    /// Whether the projection of attention's output has one.
    pub out: bool,
    /// The same of the projections of a recurrent layer's input: of Mamba-2 z, x, B, C and Δ, of linear attention queries,
    /// keys, values, z, β and α.
    pub recurrent: [Option<usize>; 6],
    /// Whether the projection of a recurrent layer's output has one.
    pub recurrent_out: bool,
    /// The same of gate and up.
    pub up: [Option<usize>; 2],
    /// Whether the MLP's last layer has one.
    pub down: bool,
    /// Of gate and up of routed experts the A that each reads.
    pub expert_up: [Option<usize>; 2],
    /// Whether the last layer of routed experts has one.
    pub expert_down: bool,
    /// How the weights of these layers are stored.
    pub base: Option<Format>,
}

impl Op {
    /// Its parameters are not trained.
    pub(super) fn freeze(&mut self, element: u64) {
        self.frozen += self.weight * element;
        (self.weight, self.matrix) = (0, 0);
    }
}

impl Chain<'_> {
    /// The GEMM that was just added, with so many matrices: if they are frozen, it saves nothing for the gradient of their
    /// weights, which is not computed.
    pub(super) fn without_frozen_gradient(&mut self, count: u64, [outputs, inputs]: [u64; 2]) {
        let (element, op) = (self.builder.element, self.ops.last_mut().expect("it was just added"));
        if op.frozen == 0 {
            return;
        }
        (op.saves, op.flops[2]) = (Vec::new(), 0.0);
        if let Some(fp8) = &mut op.fp8 {
            fp8.deferred = 0;
        }
        if let Some(base) = self.builder.adapters.and_then(|adapters| adapters.base) {
            op.frozen -= count * outputs * inputs * element;
            op.frozen += count * base.bytes(outputs as usize, inputs as usize) as u64;
            // It exists in front of its GEMMs.
            op.temporary += count * outputs * inputs * element;
        }
    }

    /// Adapters of a column-parallel layer that was just added, by output its features on this rank and which A it reads;
    /// `came` is the layer's input as the rank has it before the gather.
    pub(super) fn adapt_columns(&mut self, inputs: u64, outputs: &[(u64, Option<usize>)], came: Activation) {
        let read: BTreeSet<usize> = outputs.iter().filter_map(|(_, read)| *read).collect();
        let with = outputs.iter().filter(|(_, read)| read.is_some());
        let (count, features) = (read.len() as u64, with.map(|(features, _)| features).sum());
        let all = outputs.iter().map(|(features, _)| features).sum();
        // The B of outputs that do not all read one A are put together as one matrix.
        let block = if count == 1 && features == all { 0 } else { all };
        self.adapt([count, features], [count * inputs, all], block, (came, self.builder.local.tokens));
    }

    /// The adapter of a row-parallel layer that was just added, if `has`.
    pub(super) fn adapt_rows(&mut self, inputs: u64, outputs: u64, has: bool, came: Activation) {
        let count = u64::from(has);
        self.adapt([count, count * outputs], [count * inputs, outputs], 0, (came, self.builder.local.stream_tokens));
    }

    /// `count` adapters with so many outputs together, whose A have so many columns, of a layer with `all` outputs. Their
    /// B are put together in a matrix of `block` rows, if there are several.
    fn adapt(
        &mut self,
        [count, outputs]: [u64; 2],
        [inputs, all]: [u64; 2],
        block: u64,
        (came, tokens): (Activation, u64),
    ) {
        let Some(Adapters { rank, dora, .. }) = self.builder.adapters.filter(|_| count > 0) else { return };
        let (element, whole) = (self.builder.element, self.builder.local.tokens);
        // The outputs of A, scaled unless the matrix of all B is, and that.
        let low = self.tensor((tokens + block) * count * rank * element, None);
        let scaled = dora.then(|| self.tensor(whole * all * element, None));
        let op = self.ops.last_mut().expect("it was just added");
        op.saves = [came, low].into_iter().chain(scaled).collect();
        op.matrix = rank * (inputs + outputs);
        op.weight = op.matrix + if dora { outputs } else { 0 };
        let flops = 2.0 * whole as f64 * op.matrix as f64;
        op.flops.iter_mut().for_each(|pass| *pass += flops);
        // The adapters' outputs before they are added; a GPU's GEMM adds them.
        op.temporary += if self.builder.job.gpu { 0 } else { op.output.bytes };
    }

    /// Adapters of the grouped GEMM that was just added, of matrices `[out, in]` of which `read` says which A each
    /// output reads, if it has an adapter. They save what they read, `reads`: the GEMM's input, or that of its activation.
    pub(super) fn adapt_experts(&mut self, [outputs, inputs]: [u64; 2], read: &[Option<usize>], reads: Activation) {
        let Some(adapters) = self.builder.adapters else { return };
        let (element, local) = (self.builder.element, self.builder.local.experts);
        let count = read.iter().flatten().count() as u64;
        if count == 0 {
            return;
        }
        let of_a = read.iter().flatten().collect::<BTreeSet<_>>().len() as u64;
        let (narrow, outputs) = (of_a * adapters.rank, outputs / read.len() as u64);
        let width = narrow.next_multiple_of(EXPERT_WIDTH as u64);
        // A and B of an expert as one matrix each, unless they are it.
        let padded = if width == narrow { 0 } else { width * inputs };
        let block = if read.len() == 1 && width == narrow { 0 } else { width * outputs * read.len() as u64 };
        let low = self.tensor((2 * local.rows * width + local.count * (padded + block)) * element, None);
        // The outputs before they are scaled, and the factors of each.
        let scaled = 2 * local.rows * outputs * read.len() as u64 * element;
        let scaled = adapters.dora.then(|| self.tensor(scaled, None));
        let op = self.ops.last_mut().expect("it was just added");
        op.saves = [reads, low].into_iter().chain(scaled).collect();
        op.matrix = local.count * (narrow * inputs + adapters.rank * count * outputs);
        op.weight = op.matrix + if adapters.dora { local.count * count * outputs } else { 0 };
        let flops = 2.0 * local.rows as f64 * (width * (inputs + outputs * read.len() as u64)) as f64;
        op.flops.iter_mut().for_each(|pass| *pass += flops);
        op.temporary += op.output.bytes;
    }
}
