//! Sums along dimensions, and operations that use them.

use backend_dist::ops::moe::router_logits;
use backend_dist::ops::{expand_dim, log_sum_exp, matmul, softmax, sum, sum_dim};
use burn::tensor::{DType, Tensor};

use super::{Case, Scale, case, flat};

/// Copies of which the gradient is a sum over a dimension in the middle: more than are added one to the other.
const COPIES: usize = 20;

/// Experts of a router.
const EXPERTS: usize = 16;

pub fn sums(scale: &Scale) -> Vec<Case> {
    let Scale { seq, batch, hidden, .. } = *scale;
    let tokens = scale.tokens();
    let (shape, x) = (format!("[{seq}, {batch}, {hidden}]"), [("x", tokens * hidden)]);
    let rows = move |x: &[Tensor<1>]| -> Tensor<2> { x[0].clone().reshape([tokens, hidden]) };
    let of = |name: &'static str, dim: usize| {
        case(name, shape.clone(), 1, &x, move |_, x| {
            let x: Tensor<3> = x[0].clone().reshape([seq, batch, hidden]);
            flat(sum_dim(x, dim))
        })
    };
    let mut found = vec![of("sum_dim 0", 0), of("sum_dim 1", 1), of("sum_dim 2", 2)];
    // Of numbers that nearly cancel only f32 keeps digits.
    found.push(case("sum", shape.clone(), 1, &x, move |_, x| {
        let wide = if x[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        sum(x[0].clone().cast(wide) + 0.5)
    }));
    found.push(case("softmax", shape.clone(), 4, &x, move |_, x| flat(softmax(rows(x)))));
    found.push(case("log_sum_exp", shape.clone(), 4, &x, move |_, x| flat(log_sum_exp(rows(x)))));
    found.push(case("expand_dim", format!("[{tokens}, 1, {hidden}], {COPIES} times"), 1, &x, move |_, x| {
        let x: Tensor<3> = x[0].clone().reshape([tokens, 1, hidden]);
        flat(expand_dim(x, 1, COPIES))
    }));
    let square = [("a", tokens * hidden), ("b", tokens * hidden)];
    found.push(case("matmul", format!("[{tokens}, {hidden}] · [{hidden}, {tokens}]"), 1, &square, move |_, x| {
        flat(matmul(x[0].clone().reshape([tokens, hidden]), x[1].clone().reshape([hidden, tokens])))
    }));
    let inputs = [("x", tokens * hidden), ("w", EXPERTS * hidden)];
    found.push(case(
        "router_logits",
        format!("[{tokens}, {hidden}] · [{EXPERTS}, {hidden}]ᵀ"),
        1,
        &inputs,
        move |_, x| flat(router_logits(rows(x), x[1].clone().reshape([EXPERTS, hidden]))),
    ));
    found
}
