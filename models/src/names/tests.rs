use super::*;

fn tensor(shape: &[usize]) -> HostTensor {
    let data = (0..shape.iter().product::<usize>()).map(|value| value as f64).collect();
    HostTensor { shape: shape.to_vec(), data }
}

/// GPT-2 stores `[in, q | k | v]`.
fn map() -> NameMap {
    let mut map = NameMap::default();
    for (part, start) in [("q", 0), ("k", 2), ("v", 4)] {
        let rows = Some(vec![start..start + 1, start + 1..start + 2]);
        map.add(part, Foreign { name: "qkv".into(), transposed: true, rows, stack: None, shape: vec![3, 6] });
    }
    map.same("norm", "ln", &[3]);
    map
}

#[test]
fn import_transposes_and_picks_rows() {
    let theirs = BTreeMap::from([("qkv".to_string(), tensor(&[3, 6])), ("ln".to_string(), tensor(&[3]))]);
    let ours = map().import(&theirs).unwrap();
    assert_eq!(ours["k"], HostTensor { shape: vec![2, 3], data: vec![2.0, 8.0, 14.0, 3.0, 9.0, 15.0] });
    assert_eq!(ours["norm"], tensor(&[3]));
    assert_eq!(map().export(&ours).unwrap(), theirs);
}

#[test]
fn a_box_is_found_row_by_row() {
    let k = map().get("k").unwrap().clone();
    assert_eq!(k.runs(&[1..2, 1..3]), [Run { start: 3 + 6, step: 6, len: 2 }]);
    let plain =
        Foreign { name: "w".into(), transposed: false, rows: Some(vec![4..6, 0..1]), stack: None, shape: vec![6, 3] };
    let runs = [Run { start: 16, step: 1, len: 2 }, Run { start: 1, step: 1, len: 2 }];
    assert_eq!(plain.runs(&[1..3, 1..3]), runs);
    assert!(plain.runs(&[1..1, 0..3]).is_empty());
}

/// Gate and up of each expert are every second column of one matrix of a stack.
#[test]
fn a_stack_is_taken_apart() {
    let mut map = NameMap::default();
    for (ours, first) in [("gate", 0), ("up", 1)] {
        for index in 0..2 {
            let part = StackPart { index, first, every: 2 };
            map.stacked(format!("{ours}.{index}"), "gate_up", part, &[2, 3, 4]);
            map.stacked(format!("{ours}_bias.{index}"), "gate_up_bias", part, &[2, 4]);
        }
    }
    let theirs =
        BTreeMap::from([("gate_up".to_string(), tensor(&[2, 3, 4])), ("gate_up_bias".into(), tensor(&[2, 4]))]);
    let ours = map.import(&theirs).unwrap();
    let up = HostTensor { shape: vec![2, 3], data: vec![13.0, 17.0, 21.0, 15.0, 19.0, 23.0] };
    assert_eq!(ours["up.1"], up);
    assert_eq!(ours["gate_bias.1"], HostTensor { shape: vec![2], data: vec![4.0, 6.0] });
    assert_eq!(map.export(&ours).unwrap(), theirs);
}

#[test]
fn wrong_checkpoints_are_refused() {
    let mut theirs = BTreeMap::from([("qkv".to_string(), tensor(&[6, 3]))]);
    let refuse = |theirs: &HostTensors| map().import(theirs).unwrap_err().to_string();
    assert_eq!(refuse(&theirs), "tensor `qkv` is [6, 3], the model's configuration needs [3, 6]");
    theirs.insert("qkv".into(), tensor(&[3, 6]));
    assert_eq!(refuse(&theirs), "tensor `ln` is missing");
    theirs.insert("bias".into(), tensor(&[3]));
    assert_eq!(refuse(&theirs), "tensor `bias` is not part of the model");
}
