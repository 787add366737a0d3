//! What rules choose. That their choices are right is tested with tensors, in `tests/logical`.

use super::Placement::{self, Partial, Replicate, Shard, Strided};
use super::plan::makes_weights;
use super::rules::convolution::bias_backward;
use super::rules::elementwise::{Linearity, elementwise};
use super::rules::{Decision, Operand, Policy, matmul::matmul, shape::reshape};
use super::{Homes, MeshAxis, OpPlan, TensorState, plan};
use burn::tensor::{DType, Shape, Slice};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, MatmulOpIr, NumericOperationIr, OperationIr, SliceAssignOpIr, SliceOpIr, TensorId,
    TensorIr, TensorStatus,
};

fn operand(shape: &[usize], at: Placement) -> Operand<'_> {
    Operand { shape, at, weight: false, home: None, ends: false, is_half: false }
}

fn decided(decision: Option<Decision>) -> Option<(Vec<Placement>, Placement)> {
    decision.map(|decision| (decision.inputs, decision.outputs[0]))
}

#[test]
fn a_matmul_keeps_a_weight_where_it_is_or_gathers_it() {
    let choose = |lhs, rhs, policy| {
        let weight = Operand { weight: true, ..operand(&[1, 8, 4], rhs) };
        decided(matmul(operand(&[2, 6, 8], lhs), weight, policy))
    };
    let stays = |lhs, rhs| choose(lhs, rhs, Policy::WeightsStay);
    assert_eq!(stays(Replicate, Shard(2)), Some((vec![Replicate, Shard(2)], Shard(2))));
    assert_eq!(stays(Shard(2), Shard(1)), Some((vec![Shard(2), Shard(1)], Partial)));
    // Sequence parallelism gathers the activation.
    assert_eq!(stays(Shard(1), Shard(2)), Some((vec![Replicate, Shard(2)], Shard(2))));
    assert_eq!(stays(Shard(1), Replicate), Some((vec![Shard(1), Replicate], Shard(1))));
    // Fully sharded data parallelism gathers the weight.
    let moves = |lhs, rhs| choose(lhs, rhs, Policy::WeightsMove);
    assert_eq!(moves(Shard(0), Shard(2)), Some((vec![Shard(0), Replicate], Shard(0))));
    assert_eq!(moves(Shard(1), Shard(1)), Some((vec![Shard(1), Replicate], Shard(1))));
    assert_eq!(moves(Replicate, Shard(2)), Some((vec![Replicate, Shard(2)], Shard(2))));
}

#[test]
fn a_gradient_of_a_weight_gathers_samples_and_keeps_features() {
    let choose = |lhs, rhs, policy| decided(matmul(operand(&[2, 8, 6], lhs), operand(&[2, 6, 4], rhs), policy));
    for policy in [Policy::WeightsStay, Policy::WeightsMove] {
        assert_eq!(choose(Shard(0), Shard(2), policy), Some((vec![Replicate, Shard(2)], Shard(2))));
        assert_eq!(choose(Shard(1), Shard(0), policy), Some((vec![Shard(1), Replicate], Shard(1))));
        assert_eq!(choose(Shard(0), Shard(0), policy), Some((vec![Shard(0); 2], Shard(0))));
    }
}

#[test]
fn a_sum_waits_while_that_saves_something() {
    let choose = |linearity, x, y: (&[usize], Placement)| {
        decided(elementwise(linearity, &[operand(&[4, 6], x), operand(y.0, y.1)], &[4, 6]))
    };
    // A bias is added by one rank.
    let bias = (&[1, 6][..], Replicate);
    assert_eq!(choose(Linearity::Joint, Partial, bias), Some((vec![Partial; 2], Partial)));
    let residual = (&[4, 6][..], Replicate);
    assert_eq!(choose(Linearity::Joint, Partial, residual), Some((vec![Replicate; 2], Replicate)));
    assert_eq!(choose(Linearity::Joint, Partial, (&[4, 6], Partial)), Some((vec![Partial; 2], Partial)));
    // A residual that is sharded makes the reduction a reduce-scatter.
    assert_eq!(choose(Linearity::Joint, Partial, (&[4, 6], Shard(0))), Some((vec![Shard(0); 2], Shard(0))));
    assert_eq!(choose(Linearity::Each, Partial, (&[1, 1], Replicate)), Some((vec![Partial, Replicate], Partial)));
    assert_eq!(choose(Linearity::Each, Partial, bias), Some((vec![Replicate; 2], Replicate)));
    assert_eq!(choose(Linearity::None, Partial, bias), Some((vec![Replicate; 2], Replicate)));
    // A dimension of size one is not sharded.
    assert_eq!(choose(Linearity::None, Shard(0), bias), Some((vec![Shard(0), Replicate], Shard(0))));
}

#[test]
fn a_reshape_keeps_blocks_that_stay_blocks() {
    let to = |dim, out: &[usize]| reshape(operand(&[2, 6, 8], Shard(dim)), out, 2).map(|decision| decision.outputs[0]);
    assert_eq!(to(2, &[12, 8]), Some(Shard(1)));
    assert_eq!(to(2, &[2, 6, 4, 2]), Some(Shard(2)));
    assert_eq!(to(0, &[1, 12, 8]), Some(Shard(1)));
    // A dimension that is merged with the one before it, and one that is taken apart again.
    let merged = Strided { dim: 0, blocks: 2 };
    assert_eq!(to(1, &[12, 8]), Some(merged));
    let back = |out: &[usize]| reshape(operand(&[12, 8], merged), out, 2).map(|decision| decision.outputs[0]);
    assert_eq!((back(&[2, 6, 8]), back(&[12, 4, 2]), back(&[3, 4, 8])), (Some(Shard(1)), Some(merged), None));
    // Three heads are not divided by two ranks.
    assert_eq!(reshape(operand(&[2, 6, 6], Shard(2)), &[2, 6, 3, 2], 2), None);
}

#[test]
fn a_sum_goes_where_activations_of_its_shape_were_gathered_from() {
    let at_home = |x: Operand| decided(elementwise(Linearity::Each, &[x, operand(&[1, 1, 8], Replicate)], &[2, 6, 8]));
    let sum = operand(&[2, 6, 8], Partial);
    assert_eq!(at_home(sum), Some((vec![Replicate; 2], Replicate)));
    let home = Operand { home: Some(Shard(1)), ..sum };
    assert_eq!(at_home(home), Some((vec![Shard(1), Replicate], Shard(1))));
}

#[test]
fn a_residual_is_added_before_a_sum_that_nobody_else_reads_is_reduced() {
    let (sum, residual) = (operand(&[2, 6, 8], Partial), operand(&[2, 6, 8], Replicate));
    let added = |sum: Operand| decided(elementwise(Linearity::Joint, &[sum, residual], &[2, 6, 8]));
    assert_eq!(added(sum), Some((vec![Replicate; 2], Replicate)));
    assert_eq!(added(Operand { ends: true, ..sum }), Some((vec![Partial; 2], Partial)));
    // A sum in half precision is half as much to reduce as one with the residual.
    assert_eq!(added(Operand { ends: true, is_half: true, ..sum }), Some((vec![Replicate; 2], Replicate)));
    // Under sequence parallelism it is scattered.
    let at_home = Operand { ends: true, home: Some(Shard(1)), ..sum };
    assert_eq!(added(at_home), Some((vec![Shard(1); 2], Shard(1))));
}

fn tensor(id: u64, shape: &[usize]) -> TensorIr {
    let shape = Shape::from(shape.to_vec());
    TensorIr { id: TensorId::new(id), shape, status: TensorStatus::ReadOnly, dtype: DType::F64 }
}

/// On an axis of two ranks and one of three.
fn planned(op: &OperationIr, states: &[Vec<Placement>]) -> OpPlan {
    let states: Vec<_> = states.iter().map(|at| TensorState { at: at.clone(), weight: false }).collect();
    let axes = [2, 3].map(|ranks| MeshAxis { ranks, policy: Policy::WeightsStay });
    plan(op, |id| &states[id.value() as usize], |_| false, &axes, &Homes::default())
}

#[test]
fn two_axes_divide_an_operation_one_after_the_other() {
    let matmul = MatmulOpIr { lhs: tensor(0, &[4, 6]), rhs: tensor(1, &[6, 12]), out: tensor(2, &[4, 12]) };
    let op = OperationIr::Float(DType::F64, burn_ir::FloatOperationIr::Matmul(matmul));
    let plan = planned(&op, &[vec![Shard(0), Replicate], vec![Replicate, Shard(1)]]);
    assert_eq!(plan.outputs[0].1.at, [Shard(0), Shard(1)]);
    let shapes: Vec<Vec<usize>> = plan.local.inputs().chain(plan.local.outputs()).map(|x| x.shape.to_vec()).collect();
    assert_eq!(shapes, [[2, 6], [6, 4], [2, 4]]);
    assert!(!plan.fell_back);
}

#[test]
fn a_matrix_computed_from_a_weight_is_a_weight() {
    let is_weight = |weights: [bool; 2], shapes: [&[usize]; 2], out: &[usize]| {
        let [lhs, rhs] = [0, 1].map(|i| tensor(i, shapes[i as usize]));
        let add = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out: tensor(2, out) });
        makes_weights(&OperationIr::NumericFloat(DType::F64, add), |id| weights[id.value() as usize])
    };
    let (matrix, row) = (&[4, 6][..], &[1, 6][..]);
    assert!(is_weight([true, false], [matrix, matrix], matrix) && is_weight([false, true], [matrix, matrix], matrix));
    assert!(is_weight([true, false], [matrix, row], matrix));
    // Activations with a bias, of many tokens or one, and with a table of positions.
    assert!(!is_weight([false, true], [matrix, row], matrix) && !is_weight([false, true], [row, row], row));
    assert!(!is_weight([false, true], [&[2, 4, 6], &[1, 4, 6]], &[2, 4, 6]));
}

#[test]
fn ranges_along_a_shard_are_the_whole_shard_or_a_fallback() {
    let slice = |range: Slice| {
        let slice =
            SliceOpIr { tensor: tensor(0, &[6, 6]), ranges: vec![range, Slice::from(1..3)], out: tensor(1, &[6, 2]) };
        OperationIr::BaseFloat(BaseOperationIr::Slice(slice))
    };
    let plan = planned(&slice(Slice::from(0..6)), &[vec![Shard(0), Replicate]]);
    let OperationIr::BaseFloat(BaseOperationIr::Slice(local)) = &plan.local else { panic!("{plan:?}") };
    assert_eq!((&local.ranges[..], local.out.shape.to_vec()), (&[Slice::full(), Slice::from(1..3)][..], vec![3, 2]));
    let along = planned(&slice(Slice::from(0..6)), &[vec![Shard(1), Replicate]]);
    assert!(along.fell_back && along.outputs[0].1.at == [Replicate, Replicate]);
}

/// Two tensors of one shape in other parts, as of a projection and of an MLP, do not take each other's place.
#[test]
fn a_part_is_put_back_into_the_parts_that_it_was_taken_from() {
    let axes = [MeshAxis { ranks: 2, policy: Policy::WeightsStay }];
    let parts = [Placement::in_parts(0, &[6, 6, 12]).unwrap(), Strided { dim: 0, blocks: 3 }];
    let mut homes = Homes::default();
    for (at, size) in parts.into_iter().zip([6, 8]) {
        let ranges = vec![Slice::from(size as isize..2 * size as isize)];
        let (x, part) = (tensor(0, &[24, 3]), tensor(1, &[size, 3]));
        let taken = SliceOpIr { tensor: x.clone(), ranges: ranges.clone(), out: part.clone() };
        let put = SliceAssignOpIr { tensor: x, ranges, value: part, out: tensor(2, &[24, 3]) };
        let taken = OperationIr::BaseFloat(BaseOperationIr::Slice(taken));
        let put = OperationIr::BaseFloat(BaseOperationIr::SliceAssign(put));
        let state = |at| TensorState { at: vec![at], weight: false };
        let (whole, states) = (state(at), [state(Replicate), state(Shard(0))]);
        assert!(makes_weights(&taken, |_| true));
        let forward = plan(&taken, |_| &whole, |_| false, &axes, &homes);
        assert_eq!((&forward.outputs[0].1.at[..], forward.fell_back), (&[Shard(0)][..], false));
        let OperationIr::BaseFloat(BaseOperationIr::Slice(local)) = &forward.local else { panic!("{forward:?}") };
        assert_eq!(local.ranges, [Slice::from(size as isize / 2..size as isize)]);
        let backward = |homes: &Homes| {
            let plan = plan(&put, |id| &states[id.value() as usize], |_| false, &axes, homes);
            (plan.outputs[0].1.at[0], plan.fell_back)
        };
        assert_eq!(backward(&homes), (Replicate, true));
        assert!(homes.note(&taken, |_| &whole, &forward) && !homes.note(&taken, |_| &whole, &forward));
        assert_eq!(backward(&homes), (at, false));
    }
}

#[test]
fn a_bias_of_channels_needs_no_other_channels() {
    let [x, bias, grad] = [(&[2, 8, 5][..], Shard(1)), (&[8][..], Replicate), (&[2, 8, 6][..], Shard(1))];
    let [x, bias, grad] = [x, bias, grad].map(|(shape, at)| operand(shape, at));
    let decision = decided(bias_backward(x, bias, grad));
    assert_eq!(decision, Some((vec![Shard(1), Shard(0), Shard(1)], Shard(0))));
}
