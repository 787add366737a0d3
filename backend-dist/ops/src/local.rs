//! The elementary operations. Those that a linear layer may compute on its input are in [`residual`](super::residual).

use burn::backend::{
    TensorMetadata,
    autodiff::ops::Ops,
    tensor::{FloatTensor, IntTensor},
};

use super::{
    dropout_mask::DropoutMask,
    main_grads::{deliver, main_grad},
    operation::{Parents, Tensors, operation},
    options::{AttentionOptions, PackedHeads, Rotation},
    plain,
    saved_attention::CoreAttention,
};

operation! {
    /// The constants are cos and sin.
    pub Rope { heads: usize }, 1, ([FloatTensor<B>; 2], usize),
    |[x], Tensors { floats, .. }, tracked| {
        let [cos, sin]: [FloatTensor<B>; 2] = floats.try_into().expect("cos and sin");
        let saved = tracked.then(|| ([cos.clone(), sin.clone()], heads));
        (B::rope_apply(x, cos, sin, heads, Rotation::Forward), saved)
    },
    |([cos, sin], heads), grad, parents| {
        parents.register::<B>([B::rope_apply(grad, cos, sin, heads, Rotation::Back)]);
    },
}

operation! {
    /// Saves the output.
    pub Softcap { cap: f64 }, 1, (FloatTensor<B>, f64),
    |[x], _, _| {
        let capped = plain::activation::softcap::<B>(x, cap);
        (capped.clone(), Some((capped, cap)))
    },
    |(capped, cap), grad, parents| {
        parents.register::<B>([plain::activation::softcap_grad::<B>(capped, grad, cap)]);
    },
}

operation! {
    pub Attention { options: AttentionOptions, attention: CoreAttention }, 3,
    ([FloatTensor<B>; 3], [FloatTensor<B>; 2], AttentionOptions),
    |[q, k, v], _, tracked| {
        let qkv = tracked.then(|| [q.clone(), k.clone(), v.clone()]);
        let (out, lse) = attention.run(|| B::attention_forward(q, k, v, options));
        (out.clone(), qkv.map(|qkv| (qkv, [out, lse], options)))
    },
    |(qkv, result, options), grad, parents| {
        parents.register::<B>(B::attention_grads(qkv, result, grad, options));
    },
}

operation! {
    pub AttentionPacked { heads: PackedHeads, options: AttentionOptions, attention: CoreAttention }, 1,
    (FloatTensor<B>, [FloatTensor<B>; 2], PackedHeads, AttentionOptions),
    |[qkv], _, tracked| {
        let saved = tracked.then(|| qkv.clone());
        let (out, lse) = attention.run(|| B::attention_packed_forward(qkv, heads, options));
        (out.clone(), saved.map(|qkv| (qkv, [out, lse], heads, options)))
    },
    |(qkv, result, heads, options), grad, parents| {
        parents.register::<B>([B::attention_packed_grad(qkv, result, grad, heads, options)]);
    },
}

operation! {
    /// The constants are the ids.
    pub Embedding { first_row: usize }, 1, (IntTensor<B>, usize, usize),
    |[w], Tensors { ints, .. }, _| {
        let ids = ints.into_iter().next().expect("ids");
        let saved = (ids.clone(), first_row, w.shape()[0]);
        (B::embedding_forward(w, ids, first_row), Some(saved))
    },
    |(ids, first_row, rows), grad, parents| {
        let Parents { ops: Ops { parents: [node], .. }, grads } = parents;
        let Some(node) = node else { return };
        match main_grad::<B>(node.id) {
            Some((sum, add)) => B::embedding_accumulate_weight_grad(grad, ids, first_row, rows, &sum, add),
            None => grads.register::<B>(node.id, B::embedding_weight_grad(grad, ids, first_row, rows)),
        }
    },
}

operation! {
    pub Dropout { p: f64, key: DropoutMask }, 1, (f64, DropoutMask),
    |[x], _, _| (B::dropout_apply(x, p, &key), Some((p, key))),
    |(p, key), grad, parents| parents.register::<B>([B::dropout_apply(grad, p, &key)]),
}

operation! {
    pub AddBias {}, 2, (),
    |[x, b], _, _| (plain::linear::add_bias::<B>(x, b), Some(())),
    |(), grad, parents| {
        let Parents { ops: Ops { parents: [x, b], .. }, grads } = parents;
        if let Some(node) = b {
            deliver::<B>(grads, node.id, B::bias_grad(grad.clone()));
        }
        if let Some(node) = x {
            grads.register::<B>(node.id, grad);
        }
    },
}
