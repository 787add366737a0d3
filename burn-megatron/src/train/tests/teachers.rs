//! Files of a teacher's logits.

use super::*;
use crate::data::{TaughtDataset, TopK, TopKFile, TopKWriter, sequence_key};
use std::sync::Arc;

/// Two teachers of the same sequences went unnoticed.
#[test]
fn what_a_teachers_file_says_is_part_of_what_processes_compare() {
    let folder = book();
    let digest = |probability: f64| {
        let data = RunData::open(&config(folder.path(), &[]), &mut |_| ()).unwrap();
        let (path, train) = (folder.path().join("taught.safetensors"), data.train.clone());
        let writer = TopKWriter::create(&path, [train.len(), 16, 1], 257, (1.0, safetensors::Dtype::F64)).unwrap();
        for index in 0..train.len() {
            let said = TopK { k: 1, ids: vec![3; 16], probabilities: [probability, 1.0 - probability].repeat(16) };
            writer.write(index, sequence_key(&train.sample(index)), &said).unwrap();
        }
        writer.finish().unwrap();
        let taught = TaughtDataset { data: train, file: Arc::new(TopKFile::open(&path).unwrap()) };
        RunData { train: Arc::new(taught), ..data }.digest().unwrap()
    };
    let ([one, same, other], is_taught) = ([0.5, 0.5, 0.25].map(digest), "in distill.logits with the hash ");
    assert_eq!(one, same);
    let differ: Vec<bool> = one.iter().zip(&other).map(|(one, other)| one != other).collect();
    assert_eq!(differ, one.iter().map(|line| line.contains(is_taught)).collect::<Vec<_>>());
    assert!(differ.contains(&true));
}
