//! Builds a unit's list of operations.

use std::ops::Range;

use layouts::recompute::Module;

use super::super::collective::Collective;
use super::{Activation, Communication, Fp8Bytes, Op, Over, Unit, UnitBuilder};

/// Numbers of an FP8 activation with a scale of their own, if all do not share one. Sizes of GEMMs in FP8 are multiples of it.
const BLOCK: u64 = 128;
/// What they are multiples of if all numbers share a scale.
const MULTIPLE: u64 = 16;

/// Consecutive operations.
pub(super) struct Chain<'a> {
    pub(super) builder: &'a UnitBuilder<'a>,
    pub ops: Vec<Op>,
    /// Input of the next operation.
    pub at: Activation,
    tensors: usize,
    /// GEMMs are in FP8.
    pub fp8: bool,
    /// The start of the names of a layer's parameters.
    pub place: String,
    /// The name of the next operation's weight.
    name: Option<String>,
}

impl<'a> Chain<'a> {
    pub fn new(builder: &'a UnitBuilder<'a>, bytes: u64, stream: bool) -> Self {
        let at = Activation { id: 0, bytes, module: None, stream };
        Self { builder, ops: Vec::new(), at, tensors: 1, fp8: false, place: String::new(), name: None }
    }

    pub fn tensor(&mut self, bytes: u64, module: Option<Module>) -> Activation {
        self.tensors += 1;
        Activation { id: self.tensors - 1, bytes, module, stream: false }
    }

    /// Names the layer whose weight the next operation has.
    pub fn of(&mut self, layer: &str) -> &mut Self {
        self.name = Some(format!("{}{layer}.weight", self.place));
        self
    }

    pub fn op(&mut self, output: u64, change: impl FnOnce(&mut Op)) {
        self.op_of(output, None, change);
    }

    /// An operation whose output is recomputed with a module.
    pub fn op_of(&mut self, output: u64, module: Option<Module>, change: impl FnOnce(&mut Op)) {
        let output = self.tensor(output, module);
        let mut op = Op { input: self.at, output, ..Op::default() };
        change(&mut op);
        let is_frozen = |name: String| self.builder.job.is_frozen(&name);
        if self.builder.adapters.is_some() || self.name.take().is_some_and(is_frozen) {
            op.freeze(self.builder.element);
        }
        self.at = output;
        self.ops.push(op);
    }

    pub fn parallel(&self) -> bool {
        self.builder.layout.tp > 1
    }

    pub fn norm(&mut self, module: Option<Module>) {
        self.norm_of(module, self.builder.local.hidden, self.at.bytes);
    }

    /// The norm of `features` of each token, to `bytes`.
    pub fn norm_of(&mut self, module: Option<Module>, features: u64, bytes: u64) {
        let input = self.at;
        let decoder = self.builder.decoder;
        let again = module.is_some_and(|module| self.builder.recompute.selects(module));
        self.op_of(bytes, module, |op| {
            op.saves = vec![input];
            op.weight = features * if decoder.norm_bias { 2 } else { 1 };
            op.again = again;
        });
    }

    /// A norm whose weight another layer uses too.
    pub fn norm_sharing_weight(&mut self, module: Option<Module>) {
        self.norm(module);
        self.ops.last_mut().expect("it was just added").weight = 0;
    }

    /// Enters a tensor-parallel region. Returns the tensor that the linear layer there saves: its shard of the
    /// sequence, which it gathers again for its weight's gradient.
    pub fn enter_saving_shard(&mut self) -> Activation {
        self.enter_saving_shard_of(self.builder.local.hidden)
    }

    /// The same with `width` features of each token.
    pub fn enter_saving_shard_of(&mut self, width: u64) -> Activation {
        let came = self.enter_with(width);
        if came.id != self.at.id
            && let Some(communication) = self.ops.last_mut().and_then(|op| op.communication.as_mut())
        {
            communication.again = true;
        }
        came
    }

    /// Enters a tensor-parallel region. Returns the tensor before it.
    pub fn enter(&mut self) -> Activation {
        self.enter_with(self.builder.local.hidden)
    }

    /// The same with `width` features of each token.
    pub fn enter_with(&mut self, width: u64) -> Activation {
        let came = self.at;
        let (local, sequence) = (self.builder.local, self.builder.layout.sequence_parallel());
        if !self.parallel() {
            return came;
        }
        let bytes = local.tokens * width * self.builder.element;
        let (forward, backward) = match sequence {
            true => (Some(Collective::AllGather), Some(Collective::ReduceScatter)),
            false => (None, Some(Collective::AllReduce)),
        };
        let communication = Some(Communication { forward, backward, bytes, over: Over::Tensor, again: false });
        if sequence {
            self.op(bytes, |op| op.communication = communication);
        } else {
            // The tensor stays the same; only its gradient is summed.
            let at = self.at;
            self.op(bytes, |op| {
                op.output = at;
                op.communication = communication;
            });
            self.at = at;
        }
        came
    }

    /// A GEMM. It saves `input`, in FP8 as a cast copy, or not at all if attention saves it.
    pub fn linear(&mut self, outputs: u64, inputs: u64, bias: bool, input: Activation) {
        self.linear_of(self.builder.local.tokens, [outputs, inputs], bias, input);
    }

    /// The same for another number of tokens; sizes are the numbers of outputs and inputs.
    pub fn linear_of(&mut self, tokens: u64, [outputs, inputs]: [u64; 2], bias: bool, input: Activation) {
        let element = self.builder.element;
        let gemm = 2.0 * tokens as f64 * outputs as f64 * inputs as f64;
        let fp8 = self.fp8 && self.fits_fp8(tokens, [outputs, inputs]);
        let (saves, fp8) = self.saved_by_gemm(fp8, input, outputs * inputs, tokens * outputs);
        self.op(tokens * outputs * element, |op| {
            op.saves = saves;
            op.weight = outputs * inputs + if bias { outputs } else { 0 };
            op.matrix = outputs * inputs;
            op.linear = true;
            op.fp8 = fp8;
            op.flops = [gemm; 3];
        });
        self.without_frozen_gradient(1, [outputs, inputs]);
    }

    /// Whether FP8 has GEMMs of these sizes; blocks of tokens lie within a rank's part of a sequence.
    pub fn fits_fp8(&self, tokens: u64, [outputs, inputs]: [u64; 2]) -> bool {
        let (multiple, tokens) = match self.builder.job.fp8_blocks {
            true => (BLOCK, tokens.min(self.builder.local.stream_tokens)),
            false => (MULTIPLE, tokens),
        };
        [tokens, outputs, inputs].iter().all(|size| size.is_multiple_of(multiple))
    }

    /// The tensors that a GEMM with `weight` elements of matrices and `outputs` elements of output saves, and its
    /// bytes if it is in FP8.
    pub fn saved_by_gemm(
        &mut self,
        fp8: bool,
        input: Activation,
        weight: u64,
        outputs: u64,
    ) -> (Vec<Activation>, Option<Fp8Bytes>) {
        if !fp8 {
            return (vec![input], None);
        }
        let ([byte, of_weight], numbers) = (self.builder.quantised, input.bytes / self.builder.element);
        let saves = match input.module {
            Some(Module::CoreAttention) => vec![],
            module => {
                let scales = if self.builder.job.fp8_blocks && self.builder.job.gpu { 4 * numbers / BLOCK } else { 0 };
                vec![self.tensor(numbers * byte + scales, module)]
            }
        };
        (saves, Some(Fp8Bytes { weight: weight * of_weight, deferred: (numbers + outputs) * byte }))
    }

    pub fn leave(&mut self) {
        if !self.parallel() {
            return;
        }
        let bytes = self.at.bytes;
        let (forward, backward) = match self.builder.layout.sequence_parallel() {
            true => (Collective::ReduceScatter, Some(Collective::AllGather)),
            false => (Collective::AllReduce, None),
        };
        let communication =
            Some(Communication { forward: Some(forward), backward, bytes, over: Over::Tensor, again: false });
        self.op(self.builder.stream(), |op| op.communication = communication);
    }

    /// Adds a branch to the residual stream.
    pub fn add(&mut self) {
        self.op(self.builder.stream(), |op| op.output.stream = true);
        self.at.stream = true;
    }

    pub fn unit(self, recomputed: bool, head: bool, layers: Vec<Range<usize>>) -> Unit {
        let recompute = self.builder.recompute;
        let all = [Module::CoreAttention, Module::MlpActivation, Module::Norms];
        let dropped = all.into_iter().filter(|module| recompute.selects(*module)).collect();
        Unit { ops: self.ops, recomputed, saves_attention: false, head, layers, dropped, constant: false }
    }
}
