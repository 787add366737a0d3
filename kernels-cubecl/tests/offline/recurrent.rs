//! The kernels of linear recurrences: no spills from a unit's registers.
use super::{buffer as b, registers_only, settings, settings_of};
use half::bf16;
use kernels_cubecl::pointwise::convolution::{self, causal_convolution::CausalConvolution};
use kernels_cubecl::pointwise::gated_delta::states::kernel::{Pass, chunk_states::ChunkStates};
use kernels_cubecl::pointwise::gated_norm::{Share, gated_norm::GatedNorm, gated_norm_gradients::GatedNormGradients};
use kernels_cubecl::pointwise::ssd::arrange::{Order, add_features::AddFeatures, arrange_features::ArrangeFeatures};
use kernels_cubecl::pointwise::ssd::combine::{combine_answers::CombineAnswers, combine_gradients::CombineGradients};
use kernels_cubecl::pointwise::ssd::{
    Form, SsdShape, pass::states_in_front::StatesInFront, pass::states_in_front_gradients::StatesInFrontGradients,
    steps::chunk_steps::ChunkSteps, steps_gradient::chunk_steps_gradients::ChunkStepsGradients,
    weights::decayed_scores::DecayedScores, weights_gradient::decayed_scores_gradients::DecayedScoresGradients,
};
use kernels_cubecl::pointwise::{
    CubeShape, convolution::gradient::convolution_gradients::ConvolutionGradients,
    gated_delta::gates_gradient::chunk_gates_gradients::ChunkGatesGradients,
    gated_delta::head_dots::products_of_heads::ProductsOfHeads,
    gated_delta::inverse_gradient::inverse_gradients::InverseGradients,
    gated_delta::systems::chunk_systems::ChunkSystems,
    gated_delta::systems_gradient::chunk_systems_gradients::ChunkSystemsGradients,
    gated_delta::units::unit_heads::UnitHeads, gated_delta::units::unit_heads_gradients::UnitHeadsGradients,
};

const GPU: CubeShape = CubeShape::GPU;

#[test]
fn the_convolution_stays_in_registers() {
    for (biased, divided) in [(true, true), (false, false)] {
        let form = convolution::Form { kernel: 4, biased, divided };
        let kernel = kernel!(CausalConvolution<bf16>, settings(); b(), b(), b(), b(), b(), (), (), (), (), form);
        registers_only("convolution", kernel);
        let kernel = kernel!(ConvolutionGradients<bf16>, settings();
            b(), b(), b(), b(), b(), b(), b(), (), (), (), (), form);
        registers_only("convolution gradient", kernel);
    }
}

#[test]
fn the_gated_norm_stays_in_registers() {
    let share = Share { cube: GPU, width: 512 };
    let kernel = kernel!(GatedNorm<bf16>, settings(); b(), b(), b(), b(), (), (), (), share);
    assert!(registers_only("gated norm", kernel).contains(".v4."));
    let kernel = kernel!(GatedNormGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), share);
    registers_only("gated norm gradient", kernel);
}

#[test]
fn state_space_duality_stays_in_registers() {
    let shape = SsdShape { seq: 2048, samples: 1, heads: 64, groups: 1, head_dim: 64, state: 128, chunk: 128 };
    let form = Form { heads: 64, groups: 1, head_dim: 64, state: 128, chunk: 128, divided: true };
    let order = Order::of(shape.x(), shape.chunk, 2);
    let ptx = registers_only(
        "arrange",
        kernel!(ArrangeFeatures<bf16>, settings(); b(), b(), b(), b(), b(), (), (), (), (), (), (), order),
    );
    assert!(ptx.contains(".v4."));
    registers_only("add", kernel!(AddFeatures<bf16>, settings(); b(), b(), b(), (), (), (), (), (), order));
    let kernel = kernel!(ChunkSteps<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), form, GPU);
    registers_only("steps", kernel);
    let kernel = kernel!(DecayedScores<bf16>, settings(); b(), b(), b(), b(), b(), (), (), (), (), form);
    registers_only("weights", kernel);
    let kernel = kernel!(DecayedScoresGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), form, GPU);
    registers_only("gradients of weights", kernel);
    for (begins, ends) in [(false, false), (true, true)] {
        let kernel = kernel!(StatesInFront<bf16>, settings(); b(), b(), b(), b(), b(), (), (), form, begins, ends);
        registers_only("states", kernel);
    }
    let kernel = kernel!(StatesInFrontGradients<bf16>, settings(); b(), b(), b(), b(), b(), (), (), form, GPU);
    registers_only("gradients of states", kernel);
    let kernel = kernel!(CombineAnswers<bf16>, settings(); b(), b(), b(), b(), b(), b(), (), (), (), (), form, true);
    registers_only("combine", kernel);
    let kernel = kernel!(CombineGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), form, 8, GPU);
    registers_only("gradients of x", kernel);
    let kernel = kernel!(ChunkStepsGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), (), (), 16, 8, form,
        GPU);
    registers_only("gradients of steps", kernel);
}

#[test]
fn the_gated_delta_rule_stays_in_registers() {
    let form = Form { heads: 32, groups: 16, head_dim: 128, state: 128, chunk: 64, divided: true };
    let kernel = kernel!(UnitHeads<bf16>, settings(); b(), b(), (), (), (), (), (), (), (), form, 16, GPU);
    assert!(registers_only("heads of length one", kernel).contains(".v4."));
    let kernel = kernel!(UnitHeadsGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), (), (), (), (), (), (), 4, form, 16, GPU);
    registers_only("gradients of heads of length one", kernel);
    let line = CubeShape { units: 64, ..GPU };
    let kernel = kernel!(ChunkSystems<bf16>, settings_of(64);
        b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), form, line);
    registers_only("systems", kernel);
    for backward in [false, true] {
        let pass = Pass { form, backward, begins: false, ends: false, until: !backward };
        let kernel = kernel!(ChunkStates<bf16>, settings();
            b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), pass, GPU);
        registers_only("states of the delta rule", kernel);
    }
    registers_only("dots", kernel!(ProductsOfHeads<bf16>, settings(); b(), b(), b(), (), form, 16, GPU));
    let kernel = kernel!(InverseGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), form);
    registers_only("gradients of inverses", kernel);
    let kernel = kernel!(ChunkSystemsGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), form, GPU);
    registers_only("gradients of systems", kernel);
    let kernel = kernel!(ChunkGatesGradients<bf16>, settings();
        b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), 4, form, GPU);
    registers_only("gradients of gates", kernel);
}
