//! Shards of WebDataset.

use std::fs;

use super::super::*;
use super::{golden, picture};

fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut shard = tar::Builder::new(Vec::new());
    for (name, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        shard.append_data(&mut header, name, *bytes).unwrap();
    }
    shard.into_inner().unwrap()
}

/// A shard of three samples.
fn shard() -> Vec<u8> {
    let (png, jpeg) = (fs::read(golden().join("small.png")).unwrap(), fs::read(golden().join("wide.jpg")).unwrap());
    tar(&[
        ("train/0.png", &png),
        ("train/0.cls", b"5\n"),
        ("train/1.txt", b"a wave"),
        ("train/1.jpg", &jpeg),
        ("train/2.json", br#"{"text": "another"}"#),
        ("train/2.png", &png),
    ])
}

/// img2dataset writes an image, its caption and metadata, and others write more.
#[test]
fn metadata_and_other_members_do_not_count() {
    let (folder, png) = (tempfile::tempdir().unwrap(), fs::read(golden().join("small.png")).unwrap());
    let path = folder.path().join("shard.tar");
    let open = |mut members: Vec<(&str, &[u8])>, turned: bool| {
        if turned {
            members.reverse();
        }
        fs::write(&path, tar(&members)).unwrap();
        ImageDataset::open(&path, false)
    };
    let metadata: &[u8] = br#"{"caption": "a wave", "url": "x", "width": 13, "status": "success"}"#;
    for turned in [false, true] {
        let images =
            open(vec![("0.png", &png), ("0.txt", b"a wave"), ("0.json", metadata), ("0.npy", b"\x93NUMPY")], turned);
        let images = images.unwrap();
        assert_eq!((images.len(), images.target(0)), (1, &Target::Text("a wave".into())));
        assert_eq!(images.image(0).unwrap(), picture("small.png"));
        for (members, words) in [
            (vec![("0.png", &png[..]), ("0.json", metadata)], "member 0.json: has none of `label`"),
            (vec![("0.png", &png), ("0.txt", b"a wave"), ("0.cls", b"3")], "has several of .cls, .txt and .json"),
            (vec![("0.png", &png), ("0.txt", b"a wave"), ("0.cls", b"x")], "member 0.cls: is `x`"),
            (vec![("0.png", &png), ("0.txt", b"a wave"), ("0.jpg", &png)], "has several images"),
            (vec![("0.gif", b"GIF89a.."), ("0.txt", b"a wave")], "member 0.gif is a GIF image"),
        ] {
            let refused = open(members, turned).err().unwrap().to_string();
            assert!(refused.contains(words), "{refused}: {words}");
        }
    }
}

#[test]
fn a_shard_has_the_samples_of_its_members() {
    let (folder, bytes) = (tempfile::tempdir().unwrap(), shard());
    let path = folder.path().join("shard.tar");
    fs::write(&path, &bytes).unwrap();
    let images = ImageDataset::open(&path, false).unwrap();
    let targets: Vec<_> = (0..images.len()).map(|index| images.target(index).clone()).collect();
    assert_eq!(targets, [Target::Label(5), Target::Text("a wave".into()), Target::Text("another".into())]);
    assert_eq!(images.image(1).unwrap(), picture("wide.jpg"));
    assert_eq!(images.image(2).unwrap(), picture("small.png"));
}

#[test]
fn a_shard_cut_off_anywhere_keeps_what_is_whole() {
    let (folder, bytes) = (tempfile::tempdir().unwrap(), shard());
    let path = folder.path().join("shard.tar");
    // Two blocks of zeros end a tar file, and zeros fill the last block; without them its samples are whole.
    let last = fs::metadata(golden().join("small.png")).unwrap().len() as usize;
    for length in (1..bytes.len() - 1024 - (last.next_multiple_of(512) - last)).step_by(97) {
        fs::write(&path, &bytes[..length]).unwrap();
        let refused = ImageDataset::open(&path, false).expect_err("it is cut off").to_string();
        assert!(refused.contains("shard.tar"), "{length}: {refused}");
        if let Ok(images) = ImageDataset::open(&path, true) {
            assert!(!images.skipped().is_empty() && images.len() < 3, "{length}");
            (0..images.len()).for_each(|index| drop(images.image(index).unwrap()));
        }
    }
}

/// It was a shard with fewer samples.
#[test]
fn a_shard_cut_off_between_members_says_so() {
    let (folder, bytes) = (tempfile::tempdir().unwrap(), shard());
    let path = folder.path().join("shard.tar");
    // From the start of the header to the end of the blocks of a member.
    let place = |name: &str| bytes.windows(name.len()).position(|at| at == name.as_bytes()).unwrap();
    let blocks = |name: &str| 512 + (fs::metadata(golden().join(name)).unwrap().len() as usize).next_multiple_of(512);
    let end = place("train/2.png") + blocks("small.png");
    for (length, samples, skipped) in [
        (place("train/1.txt"), 1, &["after sample train/0: the file ends without a block of zeros: it is cut off"][..]),
        (place("train/2.json"), 2, &["after sample train/1: the file ends without a block of zeros"]),
        (place("train/2.png"), 2, &["sample train/2: has no image", "after sample train/2: the file ends without"]),
        (end, 3, &["after sample train/2: the file ends without a block of zeros"]),
        // The first of the two blocks ends it, as for other programs.
        (end + 512, 3, &[]),
    ] {
        fs::write(&path, &bytes[..length]).unwrap();
        let images = ImageDataset::open(&path, true).unwrap();
        assert_eq!((images.len(), images.skipped().len()), (samples, skipped.len()), "{:?}", images.skipped());
        assert!(
            images.skipped().iter().zip(skipped).all(|(found, words)| found.contains(words)),
            "{:?}",
            images.skipped()
        );
        assert_eq!(ImageDataset::open(&path, false).is_ok(), skipped.is_empty());
    }
    fs::write(&path, b"").unwrap();
    let refused = ImageDataset::open(&path, false).err().unwrap().to_string();
    assert!(refused.contains("after its start: the file ends without a block of zeros"), "{refused}");
}
