//! States as other programs have them: of a wrapped model, and of one with frozen layers.

use std::collections::BTreeMap;

use burn_megatron::checkpoint::Kind;

use super::refused::renamed;
use super::{copied, imported, tensors};
use crate::round_trip::{save, slice, succeed, text};

/// A module of the program's own has the model: its name for it is before those of weights, also in the groups.
#[test]
fn states_of_a_wrapped_model_are_found() {
    let (folder, root) = (copied("adamw_flat"), tempfile::tempdir().unwrap());
    let plain = imported(folder.path(), &root.path().join("plain")).0;
    renamed(folder.path(), "optimizer.state.", "o.state.wrapped.");
    renamed(folder.path(), "optimizer.param_groups.", "o.param_groups.wrapped.");
    let (wrapped, said) = imported(folder.path(), &root.path().join("wrapped"));
    says!(said, "moments of 10 updates");
    assert!(tensors(&wrapped) == tensors(&plain));
    assert_eq!(wrapped.state().config, plain.state().config);
    assert_eq!(plain.state().config["optimizer"]["weight-decay"], 0.1);
}

/// Megatron-Core's stacks are of all layers and experts. They had holes.
#[test]
fn stacks_with_frozen_layers_are_whole() {
    for (name, frozen) in [("megatron_reshardable", "layers.0."), ("megatron_experts", "layers.0.mlp.experts.0.")] {
        let (folder, root) = (copied(name), tempfile::tempdir().unwrap());
        let [from, partly, out, again] = ["from", "partly", "out", "again"].map(|name| root.path().join(name));
        let from = imported(folder.path(), &from).0;
        let kept = from.tensors().iter().filter(|of| of.kind == Kind::Weight || !of.name.starts_with(frozen));
        let kept: Vec<_> = kept.map(|of| slice(&from, of)).collect();
        assert!(kept.len() < from.tensors().len(), "{name}");
        save(&partly, kept, from.state());
        let options = ["--checkpoint", text(&partly), "--optimizer", "--dtype", "bf16"];
        succeed(&[&["export", "--torch-dist", text(&out)], &options[..]].concat());

        let again = imported(&out, &again).0;
        let before: BTreeMap<_, _> = tensors(&from).into_iter().map(|(kind, of, bytes)| ((kind, of), bytes)).collect();
        for (kind, of, bytes) in tensors(&again) {
            let of_before = |kind| &before[&(kind, of.clone())];
            match kind {
                Kind::Weight => assert_eq!(bytes.len() * 2, of_before(kind).len(), "{name}: {of}"),
                Kind::Master => assert!(bytes == *of_before(Kind::Weight), "{name}: {of}"),
                _ if of.starts_with(frozen) => assert!(bytes.iter().all(|byte| *byte == 0), "{name}: {kind} {of}"),
                _ => assert!(bytes == *of_before(kind), "{name}: {kind} {of}"),
            }
        }
        let weights = from.tensors().iter().filter(|of| of.kind == Kind::Weight).count();
        assert_eq!(again.tensors().len(), 4 * weights, "{name}");
    }
}
