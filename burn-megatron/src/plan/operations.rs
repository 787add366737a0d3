//! What a rank computes for one micro-batch, operation by operation. This is the only table of what each operation keeps
//! for its backward pass (backend-dist/src/ops/autodiff.rs), sends, and costs; memory, traffic and time are sums over it.

mod mixture;

use std::ops::Range;

use backend_dist::mesh::ParallelLayout;
use models::recompute::{Granularity, Method, Module, Recompute};

use super::Job;
use super::decoder::{Decoder, Share};
use super::traffic::Collective;
use crate::schedule::stages::Stage;

/// Bytes of a token or label.
const ID: u64 = 8;

/// A tensor of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Equal for equal storage within a unit.
    pub id: usize,
    /// Its size.
    pub bytes: u64,
    /// The module whose recomputation makes it unnecessary to keep.
    pub module: Option<Module>,
    /// It is the residual stream: a branch that is not recorded needs it too.
    pub stream: bool,
}

/// An exchange with the forward's or the backward's direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// In the forward pass.
    pub forward: Option<Collective>,
    /// Of the gradient.
    pub backward: Option<Collective>,
    /// Bytes of the whole tensor, the larger side of a gather or scatter.
    pub bytes: u64,
    /// Who takes part.
    pub over: Over,
    /// The forward exchange is repeated in the backward pass.
    pub again: bool,
}

/// The ranks of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Tensor parallel ranks.
    Tensor,
    /// Those that have other parts of the sequence.
    Context,
    /// Those that together hold all experts of a layer.
    Experts,
}

/// An operation.
#[derive(Clone, Debug)]
pub struct Op {
    /// What it reads.
    pub input: Activation,
    /// What it makes.
    pub output: Activation,
    /// What it keeps until its own backward pass.
    pub keeps: Vec<Activation>,
    /// Elements of its weight and bias.
    pub weight: u64,
    /// How many of them are in matrices.
    pub matrix: u64,
    /// The weight is one of experts, which have replicas of their own.
    pub expert: bool,
    /// A matrix product whose weight gradient a zero-bubble schedule can put off.
    pub linear: bool,
    /// Of a matrix product in FP8.
    pub fp8: Option<Fp8Bytes>,
    /// Forward, input gradient, weight gradient.
    pub flops: [f64; 3],
    /// It is attention, which runs at another rate than matrix products.
    pub attention: bool,
    /// What is computed again in the backward pass under the given recomputation.
    pub again: bool,
    /// What it exchanges.
    pub exchange: Option<Exchange>,
}

/// Bytes of quantised tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Bytes {
    /// Of the weight, as it lies and transposed, from an update to the next.
    pub weight: u64,
    /// Of the input and of the output's gradient, until a weight gradient that is put off.
    pub deferred: u64,
}

/// One autodiff graph of the engine: the embedding, a layer (or several under uniform recomputation), the head.
#[derive(Clone, Debug)]
pub struct Unit {
    /// In order.
    pub ops: Vec<Op>,
    /// Only the input is kept; the forward runs again before the backward.
    pub recomputed: bool,
    /// It is the head: final norm, logits, loss.
    pub head: bool,
    /// The operations of each of its layers.
    pub layers: Vec<Range<usize>>,
    /// Modules whose outputs are not kept but computed again.
    pub dropped: Vec<Module>,
}

/// The units of a stage; with `again` all are computed again, so that ZeRO 3 can free their weights between the passes,
/// which on GPUs come back to where they were.
pub fn units(job: &Job, share: &Share, stage: &Stage, again: bool) -> Vec<Unit> {
    let Job { decoder, layout, element, recompute, fp8, .. } = job;
    // The emulation on CPU ranks keeps floats, one for both forms of a weight.
    let quantised = if job.gpu { [1, 2] } else { [job.wide(); 2] };
    let maker = Maker { decoder, share, layout, element: *element, recompute, fp8, quantised };
    let mut units = Vec::new();
    if stage.embedding {
        units.push(maker.embedding());
    }
    let layers = stage.layers.len();
    match (recompute.granularity, recompute.method) {
        (Granularity::Full, Method::Uniform) => {
            let each = recompute.num_layers.max(1);
            let parts = (0..layers).step_by(each).map(|first| first..(first + each).min(layers));
            units.extend(parts.map(|part| maker.layers(stage, part, true)));
        }
        (Granularity::Full, Method::Block) => {
            let again = |layer| layer < recompute.num_layers;
            units.extend((0..layers).map(|layer| maker.layers(stage, layer..layer + 1, again(layer))));
        }
        _ => units.extend((0..layers).map(|layer| maker.layers(stage, layer..layer + 1, false))),
    }
    if stage.loss {
        units.push(maker.head());
    }
    units.iter_mut().for_each(|unit| unit.recomputed |= again);
    units
}

struct Maker<'a> {
    decoder: &'a Decoder,
    share: &'a Share,
    layout: &'a ParallelLayout,
    element: u64,
    recompute: &'a Recompute,
    /// Layers of the model that are in FP8.
    fp8: &'a Range<usize>,
    /// Bytes of a quantised activation, and of a weight in all forms that are kept.
    quantised: [u64; 2],
}

impl Maker<'_> {
    fn embedding(&self) -> Unit {
        let (share, hidden) = (self.share, self.share.hidden);
        let mut chain = Chain::new(self, share.tokens * ID, false);
        let ids = chain.at;
        chain.op(share.tokens * hidden * self.element, |op| {
            op.keeps = vec![ids];
            op.weight = share.vocab * hidden;
        });
        chain.leave();
        if let Some(positions) = self.decoder.positions {
            chain.op(self.stream(), |op| op.weight = positions as u64 * hidden);
        }
        chain.unit(false, false, Vec::new())
    }

    /// Some of a stage's layers.
    fn layers(&self, stage: &Stage, part: Range<usize>, recomputed: bool) -> Unit {
        let mut chain = Chain::new(self, self.stream(), true);
        let mut layers = Vec::new();
        for layer in part.map(|layer| stage.layers.start + layer) {
            let first = chain.ops.len();
            chain.fp8 = self.fp8.contains(&layer);
            self.attention(&mut chain);
            match self.decoder.experts_of(layer) {
                Some(experts) => self.mixture(&mut chain, experts),
                None => self.mlp(&mut chain),
            }
            layers.push(first..chain.ops.len());
        }
        chain.unit(recomputed, false, layers)
    }

    fn attention(&self, chain: &mut Chain) {
        let (decoder, share) = (self.decoder, self.share);
        let bias = decoder.attention_bias;
        chain.norm(Some(Module::Norms));
        let input = chain.enter_again();
        chain.linear(share.queries + 2 * share.keys, share.hidden, bias, input);
        if decoder.head_norms {
            let input = chain.at;
            chain.op(input.bytes, |op| {
                op.keeps = vec![input];
                op.weight = 2 * decoder.head_dim as u64;
            });
        }
        if decoder.positions.is_none() {
            chain.op(chain.at.bytes, |_| {});
        }
        let (qkv, statistics) = (chain.at, share.tokens * share.heads * self.element.max(4));
        let lse = chain.tensor(statistics, Some(Module::CoreAttention));
        // Two products of queries with the keys they see; the gradient computes the scores again and has four more.
        let flops = 4.0 * share.tokens as f64 * share.queries as f64 * share.visible;
        let keys_and_values = 2 * share.tokens * share.keys * self.element;
        let exchange = (self.layout.cp > 1).then_some(Exchange {
            forward: Some(Collective::AllGather),
            backward: Some(Collective::ReduceScatter),
            bytes: keys_and_values * self.layout.cp as u64,
            over: Over::Context,
            again: true,
        });
        let again = self.recompute.selects(Module::CoreAttention);
        chain.op_of(share.tokens * share.queries * self.element, Some(Module::CoreAttention), |op| {
            op.keeps = vec![qkv, op.output, lse];
            op.flops = [flops, 2.5 * flops, 0.0];
            op.attention = true;
            op.again = again;
            op.exchange = exchange;
        });
        chain.linear(share.hidden, share.queries, bias, chain.at);
        chain.leave();
        chain.add();
    }

    fn mlp(&self, chain: &mut Chain) {
        chain.norm(Some(Module::Norms));
        self.plain_mlp(chain, self.share.intermediate);
        chain.add();
    }

    /// An MLP of which the rank has `width` features.
    fn plain_mlp(&self, chain: &mut Chain, width: u64) {
        let (decoder, share) = (self.decoder, self.share);
        let input = chain.enter_again();
        chain.linear(if decoder.gated { 2 * width } else { width }, share.hidden, decoder.mlp_bias, input);
        let input = chain.at;
        let again = self.recompute.selects(Module::MlpActivation);
        chain.op_of(share.tokens * width * self.element, Some(Module::MlpActivation), |op| {
            op.keeps = vec![input];
            op.again = again;
        });
        chain.linear(share.hidden, width, decoder.mlp_bias, chain.at);
        chain.leave();
    }

    fn head(&self) -> Unit {
        let share = self.share;
        let mut chain = Chain::new(self, self.stream(), true);
        chain.norm(None);
        chain.enter();
        chain.linear(share.vocab, share.hidden, false, chain.at);
        let logits = chain.at;
        let wide = self.element.max(4);
        let statistics = chain.tensor(share.tokens * wide, None);
        let labels = chain.tensor(share.tokens * ID, None);
        let exchange = chain.parallel().then_some(Exchange {
            forward: Some(Collective::AllReduce),
            backward: None,
            bytes: 3 * share.tokens * wide,
            over: Over::Tensor,
            again: false,
        });
        chain.op(share.tokens * wide, |op| {
            op.keeps = vec![logits, statistics, labels];
            op.exchange = exchange;
        });
        chain.unit(false, true, Vec::new())
    }

    /// Bytes of the residual stream.
    fn stream(&self) -> u64 {
        self.share.stream_tokens * self.share.hidden * self.element
    }
}

/// Operations one after the other.
struct Chain<'a> {
    maker: &'a Maker<'a>,
    ops: Vec<Op>,
    at: Activation,
    tensors: usize,
    /// Matrix products are in FP8.
    fp8: bool,
}

impl<'a> Chain<'a> {
    fn new(maker: &'a Maker<'a>, bytes: u64, stream: bool) -> Self {
        let at = Activation { id: 0, bytes, module: None, stream };
        Self { maker, ops: Vec::new(), at, tensors: 1, fp8: false }
    }

    fn tensor(&mut self, bytes: u64, module: Option<Module>) -> Activation {
        self.tensors += 1;
        Activation { id: self.tensors - 1, bytes, module, stream: false }
    }

    fn op(&mut self, output: u64, change: impl FnOnce(&mut Op)) {
        self.op_of(output, None, change);
    }

    /// An operation whose output a module's recomputation makes again.
    fn op_of(&mut self, output: u64, module: Option<Module>, change: impl FnOnce(&mut Op)) {
        let output = self.tensor(output, module);
        let mut op = Op {
            input: self.at,
            output,
            keeps: Vec::new(),
            weight: 0,
            matrix: 0,
            expert: false,
            linear: false,
            fp8: None,
            flops: [0.0; 3],
            attention: false,
            again: false,
            exchange: None,
        };
        change(&mut op);
        self.at = output;
        self.ops.push(op);
    }

    fn parallel(&self) -> bool {
        self.maker.layout.tp > 1
    }

    fn norm(&mut self, module: Option<Module>) {
        let input = self.at;
        let decoder = self.maker.decoder;
        let again = module.is_some_and(|module| self.maker.recompute.selects(module));
        self.op_of(input.bytes, module, |op| {
            op.keeps = vec![input];
            op.weight = decoder.hidden as u64 * if decoder.norm_bias { 2 } else { 1 };
            op.again = again;
        });
    }

    /// Goes into a tensor parallel region; gives what the linear layer there keeps, which gathers its part of the sequence
    /// again for its weight's gradient.
    fn enter_again(&mut self) -> Activation {
        let came = self.enter();
        if came.id != self.at.id
            && let Some(exchange) = self.ops.last_mut().and_then(|op| op.exchange.as_mut())
        {
            exchange.again = true;
        }
        came
    }

    /// Goes into a tensor parallel region; gives what it came with.
    fn enter(&mut self) -> Activation {
        let came = self.at;
        let (share, sequence) = (self.maker.share, self.maker.layout.sequence_parallel());
        if !self.parallel() {
            return came;
        }
        let bytes = share.tokens * share.hidden * self.maker.element;
        let (forward, backward) = match sequence {
            true => (Some(Collective::AllGather), Some(Collective::ReduceScatter)),
            false => (None, Some(Collective::AllReduce)),
        };
        let exchange = Some(Exchange { forward, backward, bytes, over: Over::Tensor, again: false });
        if sequence {
            self.op(bytes, |op| op.exchange = exchange);
        } else {
            // The same tensor goes on; only its gradient is summed.
            let at = self.at;
            self.op(bytes, |op| {
                op.output = at;
                op.exchange = exchange;
            });
            self.at = at;
        }
        came
    }

    /// A matrix product; `input` is what it keeps, in FP8 quantised, or not at all if attention keeps it.
    fn linear(&mut self, outputs: u64, inputs: u64, bias: bool, input: Activation) {
        let (tokens, element) = (self.maker.share.tokens, self.maker.element);
        let product = 2.0 * tokens as f64 * outputs as f64 * inputs as f64;
        let [activation, weight] = self.maker.quantised;
        let fp8 = self.fp8.then(|| Fp8Bytes {
            weight: outputs * inputs * weight,
            deferred: (input.bytes / element + tokens * outputs) * activation,
        });
        let keeps = match self.fp8 {
            false => vec![input],
            true if input.module == Some(Module::CoreAttention) => vec![],
            true => vec![self.tensor(input.bytes / element * activation, input.module)],
        };
        self.op(tokens * outputs * element, |op| {
            op.keeps = keeps;
            op.weight = outputs * inputs + if bias { outputs } else { 0 };
            op.matrix = outputs * inputs;
            op.linear = true;
            op.fp8 = fp8;
            op.flops = [product; 3];
        });
    }

    fn leave(&mut self) {
        if !self.parallel() {
            return;
        }
        let bytes = self.at.bytes;
        let (forward, backward) = match self.maker.layout.sequence_parallel() {
            true => (Collective::ReduceScatter, Some(Collective::AllGather)),
            false => (Collective::AllReduce, None),
        };
        let exchange = Some(Exchange { forward: Some(forward), backward, bytes, over: Over::Tensor, again: false });
        self.op(self.maker.stream(), |op| op.exchange = exchange);
    }

    /// Adds a branch to the residual stream.
    fn add(&mut self) {
        self.op(self.maker.stream(), |op| op.output.stream = true);
        self.at.stream = true;
    }

    fn unit(self, recomputed: bool, head: bool, layers: Vec<Range<usize>>) -> Unit {
        let recompute = self.maker.recompute;
        let all = [Module::CoreAttention, Module::MlpActivation, Module::Norms];
        let dropped = all.into_iter().filter(|module| recompute.selects(*module)).collect();
        Unit { ops: self.ops, recomputed, head, layers, dropped }
    }
}
