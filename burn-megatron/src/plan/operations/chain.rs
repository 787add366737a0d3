//! How a unit's list of operations is written down.

use std::ops::Range;

use models::recompute::Module;

use super::super::traffic::Collective;
use super::{Activation, Exchange, Fp8Bytes, Maker, Op, Over, Unit};

/// Operations one after the other.
pub(super) struct Chain<'a> {
    maker: &'a Maker<'a>,
    pub ops: Vec<Op>,
    /// What the next operation reads.
    pub at: Activation,
    tensors: usize,
    /// Matrix products are in FP8.
    pub fp8: bool,
}

impl<'a> Chain<'a> {
    pub fn new(maker: &'a Maker<'a>, bytes: u64, stream: bool) -> Self {
        let at = Activation { id: 0, bytes, module: None, stream };
        Self { maker, ops: Vec::new(), at, tensors: 1, fp8: false }
    }

    pub fn tensor(&mut self, bytes: u64, module: Option<Module>) -> Activation {
        self.tensors += 1;
        Activation { id: self.tensors - 1, bytes, module, stream: false }
    }

    pub fn op(&mut self, output: u64, change: impl FnOnce(&mut Op)) {
        self.op_of(output, None, change);
    }

    /// An operation whose output a module's recomputation makes again.
    pub fn op_of(&mut self, output: u64, module: Option<Module>, change: impl FnOnce(&mut Op)) {
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

    pub fn parallel(&self) -> bool {
        self.maker.layout.tp > 1
    }

    pub fn norm(&mut self, module: Option<Module>) {
        self.norm_of(module, self.maker.share.hidden, self.at.bytes);
    }

    /// The norm of `features` of each token, to `bytes`.
    pub fn norm_of(&mut self, module: Option<Module>, features: u64, bytes: u64) {
        let input = self.at;
        let decoder = self.maker.decoder;
        let again = module.is_some_and(|module| self.maker.recompute.selects(module));
        self.op_of(bytes, module, |op| {
            op.keeps = vec![input];
            op.weight = features * if decoder.norm_bias { 2 } else { 1 };
            op.again = again;
        });
    }

    /// A norm whose weight another layer uses too.
    pub fn norm_again(&mut self, module: Option<Module>) {
        self.norm(module);
        self.ops.last_mut().expect("it was just added").weight = 0;
    }

    /// Goes into a tensor parallel region; gives what the linear layer there keeps, which gathers its part of the
    /// sequence again for its weight's gradient.
    pub fn enter_again(&mut self) -> Activation {
        self.enter_again_with(self.maker.share.hidden)
    }

    /// The same with `width` features of each token.
    pub fn enter_again_with(&mut self, width: u64) -> Activation {
        let came = self.enter_with(width);
        if came.id != self.at.id
            && let Some(exchange) = self.ops.last_mut().and_then(|op| op.exchange.as_mut())
        {
            exchange.again = true;
        }
        came
    }

    /// Goes into a tensor parallel region; gives what it came with.
    pub fn enter(&mut self) -> Activation {
        self.enter_with(self.maker.share.hidden)
    }

    /// The same with `width` features of each token.
    pub fn enter_with(&mut self, width: u64) -> Activation {
        let came = self.at;
        let (share, sequence) = (self.maker.share, self.maker.layout.sequence_parallel());
        if !self.parallel() {
            return came;
        }
        let bytes = share.tokens * width * self.maker.element;
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
    pub fn linear(&mut self, outputs: u64, inputs: u64, bias: bool, input: Activation) {
        self.linear_of(self.maker.share.tokens, [outputs, inputs], bias, input);
    }

    /// The same for another number of tokens; sizes are those of the outputs and inputs.
    pub fn linear_of(&mut self, tokens: u64, [outputs, inputs]: [u64; 2], bias: bool, input: Activation) {
        let element = self.maker.element;
        let product = 2.0 * tokens as f64 * outputs as f64 * inputs as f64;
        let (keeps, fp8) = self.kept_by_product(self.fp8, input, outputs * inputs, tokens * outputs);
        self.op(tokens * outputs * element, |op| {
            op.keeps = keeps;
            op.weight = outputs * inputs + if bias { outputs } else { 0 };
            op.matrix = outputs * inputs;
            op.linear = true;
            op.fp8 = fp8;
            op.flops = [product; 3];
        });
    }

    /// What a product with matrices of `weight` elements keeps of its input, and its bytes if it is in FP8, for
    /// `outputs` elements of its result.
    pub fn kept_by_product(
        &mut self,
        fp8: bool,
        input: Activation,
        weight: u64,
        outputs: u64,
    ) -> (Vec<Activation>, Option<Fp8Bytes>) {
        if !fp8 {
            return (vec![input], None);
        }
        let ([byte, of_weight], numbers) = (self.maker.quantised, input.bytes / self.maker.element);
        let keeps = match input.module {
            Some(Module::CoreAttention) => vec![],
            module => vec![self.tensor(numbers * byte, module)],
        };
        (keeps, Some(Fp8Bytes { weight: weight * of_weight, deferred: (numbers + outputs) * byte }))
    }

    pub fn leave(&mut self) {
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
    pub fn add(&mut self) {
        self.op(self.maker.stream(), |op| op.output.stream = true);
        self.at.stream = true;
    }

    pub fn unit(self, recomputed: bool, head: bool, layers: Vec<Range<usize>>) -> Unit {
        let recompute = self.maker.recompute;
        let all = [Module::CoreAttention, Module::MlpActivation, Module::Norms];
        let dropped = all.into_iter().filter(|module| recompute.selects(*module)).collect();
        Unit { ops: self.ops, recomputed, keeps_attention: false, head, layers, dropped }
    }
}
