mod shards;

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::*;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images")
}

fn picture(name: &str) -> RgbImage {
    RgbImage::decode(&fs::read(golden().join(name)).unwrap()).unwrap()
}

#[test]
fn decoded_images_are_those_of_pillow() {
    let bytes = fs::read(golden().join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    for name in ["small.png", "wide.png", "grey.png", "alpha.png", "palette.png"] {
        let (tensor, image) = (expected.tensor(&format!("decoded.{name}")).unwrap(), picture(name));
        assert_eq!(tensor.shape(), [image.height, image.width, 3], "{name}");
        assert!(tensor.data() == image.pixels, "{name}");
    }
    // The transform of JPEG may round differently: libjpeg-turbo's is of another order.
    let (tensor, image) = (expected.tensor("decoded.wide.jpg").unwrap(), picture("wide.jpg"));
    let furthest = tensor.data().iter().zip(&image.pixels).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    assert!(tensor.data().len() == image.pixels.len() && furthest <= 4, "{furthest}");
}

#[test]
fn processed_images_are_those_of_transformers_to_the_bit() {
    let bytes = fs::read(golden().join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let files: Value = serde_json::from_slice(&fs::read(golden().join("processors.json")).unwrap()).unwrap();
    let files = files.as_object().unwrap();
    assert_eq!(files.len(), 5);
    for (case, file) in files {
        let processor = ImageProcessor::from_json(file).unwrap();
        for name in ["small.png", "wide.png"] {
            let tensor = expected.tensor(&format!("{case}.{name}")).unwrap();
            let values: Vec<f32> = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let pixels = processor.process(&picture(name));
            let [height, width] = processor.output().unwrap();
            assert_eq!(tensor.shape(), [3, height, width], "{case} {name}");
            let wrong = values.iter().zip(&pixels).filter(|(a, b)| a != b).count();
            assert!(values.len() == pixels.len() && wrong == 0, "{case} {name}: {wrong} of {} differ", values.len());
        }
    }
}

#[test]
fn wrong_processors_are_refused_by_key() {
    let vit = |key: &str, value: Value| {
        let mut file = json!({"image_processor_type": "ViTImageProcessor"});
        file[key] = value;
        ImageProcessor::from_json(&file).unwrap_err().to_string()
    };
    for (key, value, words) in [
        ("image_processor_type", json!("SamImageProcessor"), "SamImageProcessor; legal: ViTImageProcessor"),
        ("resample", json!(0), "`resample` is 0; legal: 1"),
        ("size", json!({"height": 0, "width": 8}), "`size` is 0 × 8; legal: 1 to 16384"),
        ("crop_size", json!({"shortest_edge": 8}), "`crop_size` has `shortest_edge`"),
        ("image_std", json!([0.5, 0.0, 0.5]), "`image_std` has 0"),
        ("image_std", json!(0.5), "`image_std` is 0.5; legal: three numbers"),
        ("resample", json!("bicubic"), "`resample` is \"bicubic\"; legal: 1 (Lanczos), 2"),
        ("size", json!("large"), "`size` is \"large\"; legal: a number of pixels"),
        ("size", json!({"height": 8, "width": 8, "longest_edge": 9}), "`size` is {\"height\":8,"),
        ("image_mean", json!(0.5), "`image_mean` is 0.5; legal: three numbers"),
        ("do_resize", json!("no"), "`do_resize` is \"no\"; legal: true, false"),
        ("image_processor_type", json!(null), "`image_processor_type` is missing; legal: ViTImageProcessor"),
        ("do_reduce_labels", json!(true), "`do_reduce_labels` is true; legal: no such key"),
    ] {
        let error = vit(key, value);
        assert!(error.starts_with("preprocessor_config.json: ") && error.contains(words), "{error}");
    }
}

/// SigLIP's defaults are ViT's with the bicubic filter, whose pixels the oracle has; newer folders nest them.
#[test]
fn siglip_and_processor_config() {
    let read = |file: Value| ImageProcessor::from_json(&file).unwrap();
    let siglip = read(json!({"image_processor_type": "SiglipImageProcessor"}));
    assert_eq!(siglip, read(json!({"image_processor_type": "ViTImageProcessor", "resample": 3})));
    let nested = json!({
        "image_processor": {
            "do_rescale": true, "do_resize": true, "do_normalize": true, "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessorFast", "image_std": [0.5, 0.5, 0.5], "resample": 3,
            "data_format": "channels_first", "size": {"height": 384, "width": 384},
        },
        "image_token": "<image>", "num_additional_image_tokens": 0, "patch_size": 14,
        "processor_class": "LlavaProcessor", "vision_feature_select_strategy": "full",
    });
    assert_eq!(read(nested.clone()), read(nested["image_processor"].clone()));
    assert_eq!(read(nested).output(), Some([384, 384]));
}

#[test]
fn the_published_files_are_read() {
    let grey = RgbImage { width: 4, height: 3, pixels: vec![128; 36] };
    for (file, size, first) in [
        (
            json!({"do_normalize": true, "do_rescale": true, "do_resize": true, "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "ViTFeatureExtractor", "image_std": [0.5, 0.5, 0.5], "resample": 2,
            "rescale_factor": 0.00392156862745098, "size": {"height": 224, "width": 224}}),
            224,
            (128.0 / 255.0 - 0.5) / 0.5,
        ),
        (
            json!({"crop_size": {"height": 336, "width": 336}, "do_center_crop": true, "do_convert_rgb": true,
            "do_normalize": true, "do_rescale": true, "do_resize": true,
            "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "CLIPImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3,
            "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336}}),
            336,
            (128.0 / 255.0 - 0.48145466) / 0.26862954,
        ),
        // An older file has the second key, and sizes as numbers.
        (
            json!({"crop_size": 224, "do_center_crop": true, "do_normalize": true, "do_resize": true,
            "feature_extractor_type": "CLIPFeatureExtractor", "image_processor_type": "CLIPImageProcessor",
            "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 3, "size": 224, "do_rescale": null, "do_pad": null, "crop_pct": null}),
            224,
            (128.0 / 255.0 - 0.48145466) / 0.26862954,
        ),
    ] {
        let processor = ImageProcessor::from_json(&file).unwrap();
        let pixels = processor.process(&grey);
        assert_eq!((processor.output(), pixels.len()), (Some([size; 2]), 3 * size * size));
        assert!((f64::from(pixels[0]) - first).abs() < 1e-6, "{} {first}", pixels[0]);
    }
}

/// A number alone is the side of a square or the shorter side.
#[test]
fn a_size_of_one_number_is_what_the_file_says() {
    let wide = RgbImage { width: 20, height: 10, pixels: vec![128; 600] };
    let values = |kind: &str, square: Value| {
        let file =
            json!({"image_processor_type": kind, "size": 8, "do_center_crop": false, "default_to_square": square});
        ImageProcessor::from_json(&file).unwrap().process(&wide).len() / 3
    };
    let (vit, clip) = ("ViTImageProcessor", "CLIPImageProcessor");
    assert_eq!([values(vit, json!(null)), values(clip, json!(true))], [64; 2]);
    assert_eq!([values(clip, json!(null)), values(vit, json!(false))], [128; 2]);
}

#[test]
fn of_16_bits_the_upper_ones_are_kept() {
    let pixels = |png: &[u8]| RgbImage::decode(png).unwrap().pixels;
    assert_eq!(pixels(&RGB16), [0x12, 0x56, 0x9a, 0xff, 0x00, 0x80]);
    assert_eq!(pixels(&GREY16), [0x12, 0x12, 0x12, 0xfe, 0xfe, 0xfe]);
}

/// Two pixels of 16 bits: 1234 5678 9abc and ffff 0080 807f.
const RGB16: [u8; 78] = *b"\x89\x50\x4e\x47\x0d\x0a\x1a\x0a\x00\x00\x00\x0d\x49\x48\x44\x52\x00\x00\x00\x02\x00\x00\x00\x01\x10\x02\x00\x00\
    \x00\x2b\xd0\x34\x9e\x00\x00\x00\x15\x49\x44\x41\x54\x78\x9c\x63\x10\x32\x09\xab\x98\xb5\xe7\xff\x7f\x86\x86\x86\
    \x7a\x00\x22\x9d\x05\xe8\x0e\xbf\x84\x7b\x00\x00\x00\x00\x49\x45\x4e\x44\xae\x42\x60\x82";

/// 1234 and fedc.
const GREY16: [u8; 70] = *b"\x89\x50\x4e\x47\x0d\x0a\x1a\x0a\x00\x00\x00\x0d\x49\x48\x44\x52\x00\x00\x00\x02\x00\x00\x00\x01\x10\x00\x00\x00\
    \x00\x81\xd9\xfc\x15\x00\x00\x00\x0d\x49\x44\x41\x54\x78\x9c\x63\x10\x32\xf9\x77\x07\x00\x03\xc1\x02\x21\x0d\xe3\
    \x47\x32\x00\x00\x00\x00\x49\x45\x4e\x44\xae\x42\x60\x82";

#[test]
fn unusable_lines_are_named_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden().join("small.png"), folder.path().join("a.png")).unwrap();
    fs::write(folder.path().join("b.gif"), b"GIF89a....").unwrap();
    fs::write(folder.path().join("c.png"), b"").unwrap();
    let png = fs::read(golden().join("small.png")).unwrap();
    fs::write(folder.path().join("d.png"), &png[..png.len() / 2]).unwrap();
    let list = folder.path().join("list.jsonl");
    let lines = [
        r#"{"image": "a.png", "text": "a wave"}"#,
        "",
        r#"{"image": "b.gif", "label": 1}"#,
        r#"{"image": "c.png", "label": 1}"#,
        r#"{"image": "none.png", "label": 1}"#,
        r#"{"image": "a.png", "label": -1}"#,
        r#"{"image": "a.png"}"#,
        r#"{"image": "a.png", "label": 1, "text": ""}"#,
        r#"{"label": 1}"#,
        "{",
        r#"{"image": "d.png", "label": 2}"#,
        r#"{"image": "a.png", "messages": [{"role": "user", "content": "?"}]}"#,
    ];
    fs::write(&list, lines.join("\n")).unwrap();
    let refused = ImageDataset::open(&list, false).err().unwrap().to_string();
    assert!(
        refused.starts_with("8 of 11 samples cannot be used") && refused.contains("list.jsonl:3: image b.gif is a GIF")
    );
    let images = ImageDataset::open(&list, true).unwrap();
    for (skipped, words) in images.skipped().iter().zip([
        "list.jsonl:3: image b.gif is a GIF image; PNG and JPEG are read",
        "list.jsonl:4: image c.png is empty",
        "list.jsonl:5: image none.png: No such file",
        "list.jsonl:6: `label` is -1",
        "list.jsonl:7: has none of `label`",
        "list.jsonl:8: has more than one",
        "list.jsonl:9: `image` is missing",
        "list.jsonl:10: is no JSON",
    ]) {
        assert!(skipped.contains(words), "{skipped}: {words}");
    }
    assert_eq!((images.len(), images.target(0)), (3, &Target::Text("a wave".into())));
    assert_eq!(images.image(0).unwrap(), picture("small.png"));
    assert_eq!(images.target(1), &Target::Label(2));
    let damaged = images.image(1).unwrap_err().to_string();
    assert!(damaged.contains("list.jsonl:11: image d.png is a damaged PNG image"), "{damaged}");
    assert!(matches!(images.target(2), Target::Messages(_)));
}

/// As some editors save it.
#[test]
fn a_list_may_begin_with_a_byte_order_mark() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("train.jsonl");
    let line = json!({"image": golden().join("small.png"), "label": 1});
    fs::write(&list, format!("\u{feff}{line}\r\n{line}\r\n")).unwrap();
    assert_eq!(ImageDataset::open(&list, false).unwrap().len(), 2);
}
