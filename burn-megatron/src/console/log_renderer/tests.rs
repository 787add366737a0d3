//! What the renderer writes, line by line.

use parking_lot::Mutex;
use std::sync::Arc;

use burn::train::metric::{MetricEntry, NumericAttributes, NumericEntry, SerializedEntry};

use super::*;

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Page {
    fn lines(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().clone()).unwrap().lines().map(str::to_string).collect()
    }
}

fn numeric(name: &str, value: f64) -> MetricState {
    let entry =
        MetricEntry::new(MetricId::new(Arc::new(name.into())), SerializedEntry::new(String::new(), String::new()));
    MetricState::Numeric(entry, Some(NumericEntry::Value(value)))
}

fn renderer(page: &Page) -> LogRenderer {
    let mut renderer = LogRenderer::new(page.clone());
    for (name, unit) in [("Loss", None), ("Memory", Some("MiB".to_string()))] {
        let name = Arc::new(name.to_string());
        renderer.register_metric(MetricDefinition {
            metric_id: MetricId::new(name.clone()),
            name,
            description: None,
            attributes: NumericAttributes { unit, higher_is_better: false }.into(),
        });
    }
    renderer
}

fn steps(done: usize, total: usize) -> Progress {
    Progress::new(done, total, Some(STEPS.to_string()))
}

#[test]
fn a_step_is_one_line_and_steps_count_over_epochs() {
    let page = Page::default();
    let mut renderer = renderer(&page).counting_steps(100, 1);
    renderer.start(2, 1, None, None);
    for (epoch, loss) in [(1, 3.0), (2, 2.5)] {
        renderer.start_split("train", &steps(0, 1));
        for reported_twice in [loss, loss + 0.25] {
            renderer.update_train(numeric("Loss", reported_twice));
            renderer.update_train(numeric("Memory", 512.0));
            renderer.update_split(&steps(1, 1));
        }
        renderer.end_split(&steps(1, 1));
        renderer.update_epoch(epoch);
    }
    renderer.start_split("valid", &steps(0, 2));
    renderer.update_valid(numeric("Loss", 2.25));
    renderer.update_split(&steps(2, 2));
    renderer.end_split(&steps(2, 2));
    assert_eq!(
        page.lines(),
        [
            "step   1/100 | loss 3.0000 | memory 512 MiB",
            "step   2/100 | loss 2.5000 | memory 512 MiB",
            "validation after step   2/100 | loss 2.2500"
        ]
    );
}

#[test]
fn an_evaluation_before_the_first_step_is_after_none() {
    let page = Page::default();
    let mut renderer = renderer(&page).counting_steps(100, 10);
    renderer.start(10, 2, None, None);
    renderer.start_split("valid", &steps(0, 2));
    renderer.update_valid(numeric("Loss", 2.25));
    renderer.end_split(&steps(2, 2));
    assert_eq!(page.lines(), ["validation | loss 2.2500"]);
}

#[test]
fn items_are_counted_inside_their_epoch() {
    let page = Page::default();
    let mut renderer = renderer(&page);
    renderer.start(3, 1, None, None);
    renderer.start_split("train", &Progress::new(0, None, Some("items".into())));
    renderer.update_train(numeric("Loss", 1.0));
    renderer.update_split(&Progress::new(64, None, Some("items".into())));
    assert_eq!(page.lines(), ["epoch 1/3, items 64 | loss 1.0000"]);
}

#[test]
fn a_closed_pipe_does_not_end_the_run() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut renderer = LogRenderer::new(Closed);
    renderer.start(1, 1, None, Some("run"));
    renderer.end();
}
