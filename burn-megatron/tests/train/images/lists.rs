//! Lists of images that are not as they should be.

use super::*;

const VIT: &str = "preset = \"vit-base\"\nhidden-size = 8\nnum-hidden-layers = 1\nnum-attention-heads = 2\n\
    intermediate-size = 8\nimage-size = 8\npatch-size = 4\nnum-labels = 6\n";

/// A tar file.
fn tar(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut all = Vec::new();
    for (name, bytes) in members {
        let mut header = [0u8; 512];
        let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
        put(0, name.as_bytes());
        put(100, b"0000644\0");
        put(124, format!("{:011o}\0", bytes.len()).as_bytes());
        put(136, b"00000000000\0");
        put(148, b"        ");
        put(156, b"0");
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        all.extend(header);
        all.extend(bytes);
        all.resize(all.len().next_multiple_of(512), 0);
    }
    all.resize(all.len() + 1024, 0);
    all
}

/// A shard of every picture with its number as its class, as often.
fn shard(times: usize) -> Vec<u8> {
    let member = |index: usize| {
        let (number, key) = (index % PICTURES.len(), format!("{index:04}"));
        let (name, class) = (PICTURES[number], CLASSES[number]);
        let ending = name.rsplit('.').next().unwrap();
        let bytes = fs::read(picture(name)).unwrap();
        [(format!("{key}.{ending}"), bytes), (format!("{key}.cls"), format!("{class}\n").into_bytes())]
    };
    tar(&(0..times * PICTURES.len()).flat_map(member).collect::<Vec<_>>())
}

#[test]
fn shards_are_learned_as_lists_are() {
    let folder = tempfile::tempdir().unwrap();
    labels(&folder.path().join("train.jsonl"), 4);
    labels(&folder.path().join("valid.jsonl"), 2);
    write_run(folder.path(), VIT, "");
    let at = |name: &str| folder.path().join(name).display().to_string();
    trained(folder.path(), &["--images.validation", &at("valid.jsonl")]);
    let of_list = ["loss", "accuracy"].map(|name| logged(&folder.path().join("run"), name));

    fs::write(folder.path().join("a.tar"), shard(2)).unwrap();
    let lists = format!("[\"{}\", \"{}\"]", at("a.tar"), at("a.tar"));
    let flags = ["--images.train", &lists, "--images.validation", &at("a.tar"), "--output.directory", &at("shards")];
    let said = trained(folder.path(), &flags);
    assert!(said.contains("training: 24 images") && said.contains("validation: 12 images"), "{said}");
    assert_eq!(["loss", "accuracy"].map(|name| logged(&folder.path().join("shards"), name)), of_list);
}

/// Files that are missing, of another kind, cut off or without a class are counted and named, and left out if asked.
#[test]
fn bad_samples_are_named_counted_and_left_out_if_asked() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("train.jsonl");
    labels(&list, 4);
    write_run(folder.path(), VIT, "");
    let good = fs::read_to_string(&list).unwrap();
    fs::write(folder.path().join("moving.gif"), b"GIF89a......").unwrap();
    fs::write(folder.path().join("cut.png"), &fs::read(picture("wide.png")).unwrap()[..900]).unwrap();
    let skip: &[&str] = &["--images.skip-bad-rows", "true"];
    for (line, words) in [
        (r#"{"image": "gone.png", "label": 1}"#, "train.jsonl:25: image gone.png: "),
        (r#"{"image": "moving.gif", "label": 1}"#, "image moving.gif is a GIF image"),
        (r#"{"image": "small.png", "label": 6}"#, "image small.png: `label` is 6; legal: 0 to 5"),
        (r#"{"image": "small.png", "text": "a wave"}"#, "has no `label`, and vit learns the classes of images"),
        (r#"{"image": "small.png"}"#, "train.jsonl:25: has none of `label`"),
        ("{", "train.jsonl:25: is no JSON"),
    ] {
        fs::write(&list, format!("{good}{line}\n")).unwrap();
        let message = refused(folder.path(), &[]);
        assert!(message.contains(words), "{line}: {message}");
        assert!(message.contains("1 of 25 samples cannot be used; the first: "), "{message}");
        assert!(message.contains("images.skip-bad-rows = true"), "{message}");
    }
    let said = trained(folder.path(), skip);
    assert!(said.contains("training: 24 images; 1 bad rows left out, the first: "), "{said}");
    fs::remove_dir_all(folder.path().join("run")).unwrap();

    // What begins like an image is read when its turn comes.
    let damaged = r#"{"image": "cut.png", "label": 1}"#;
    fs::write(&list, format!("{good}{damaged}\n").replace("wide.png", "cut.png")).unwrap();
    let output = train(folder.path(), &[]);
    let message = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("image cut.png is a damaged PNG image"), "{message}");
    assert!(!message.contains("\n); replace it"), "{message}");
    fs::remove_dir_all(folder.path().join("run")).unwrap();
    let said = trained(folder.path(), skip);
    assert!(said.contains("image cut.png is a damaged PNG image") && said.contains("it is left out"), "{said}");
    let whole = logged(&folder.path().join("run"), "loss");
    // In every layout the same sample takes its place.
    let other = folder.path().join("other");
    trained(folder.path(), &[skip, &[DP, "2", "--output.directory", other.to_str().unwrap()]].concat());
    let furthest = whole[0].iter().zip(&logged(&other, "loss")[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(furthest < 1e-10, "{furthest}");
}

#[test]
fn shards_that_are_cut_off_and_lists_of_other_kinds_are_named() {
    let folder = tempfile::tempdir().unwrap();
    labels(&folder.path().join("train.jsonl"), 4);
    write_run(folder.path(), VIT, "");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let whole = shard(4);
    fs::write(at("cut.tar"), &whole[..whole.len() - 3000]).unwrap();
    fs::write(at("list.csv"), "image,label\n").unwrap();
    fs::write(at("empty.jsonl"), "\n").unwrap();
    fs::write(at("processor.json"), r#"{"image_processor_type": "ViTImageProcessor", "size": 16}"#).unwrap();
    for (flags, words) in [
        (&["--images.train", &at("cut.tar")][..], "cut off"),
        (&["--images.train", &at("list.csv")], "list.csv: legal: a .jsonl file of images, or a .tar file"),
        (&["--images.train", &at("none.jsonl")], "none.jsonl: No such file"),
        (&["--images.train", &at("empty.jsonl")], "no sample is left"),
        (&["--images.processor", &at("processor.json")], "makes 16 x 16 pixels, the model takes 8 x 8"),
        (&["--images.processor", &at("list.csv")], "images.processor: "),
        (&["--data.split", "95,5,0"], "1 images for validation, fewer than training.global-batch = 8"),
        (&["--data.split", "0,1,0"], "data.split leaves no image for training"),
    ] {
        let message = refused(folder.path(), flags);
        assert!(message.contains(words), "{flags:?}: {message}");
    }
    let said = trained(folder.path(), &["--images.train", &at("cut.tar"), "--images.skip-bad-rows", "true"]);
    assert!(said.contains("bad rows left out, the first: ") && said.contains("cut off"), "{said}");
}
