//! What is an error, and how it ends.

use super::*;

/// Why a run of two ranks fails.
fn failure(run: impl Fn(&Net, &Reducer, usize) + Sync) -> String {
    let (net, mesh) = (Net::new(), Mesh::new("DP2".parse().unwrap()).unwrap());
    let result = launch(&mesh, &[Device::flex()], |rank| {
        let reducer = Reducer::with_buckets(&net, &rank.group(Axis::Dp), |_| None, 1);
        let net = reducer.attach(net.clone().fork(&device()));
        for _ in 0..2 {
            reducer.begin_pass(&net, GradientsParams::new());
            run(&net, &reducer, rank.rank);
        }
        Ok(())
    });
    result.unwrap_err().to_string()
}

#[test]
fn a_rank_that_fails_while_the_other_reduces_ends_both_with_its_error() {
    let begun = std::time::Instant::now();
    let passes = std::sync::atomic::AtomicUsize::new(0);
    let text = failure(|net, reducer, rank| {
        let loss = net.loss(batch(0, rank, 2), true);
        // In the second pass the other rank waits inside its backward pass.
        if rank == 1 && passes.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 1 {
            panic!("the gradients ran into a wall");
        }
        let grads = backward(net, loss);
        reducer.end_pass(net, grads);
    });
    assert!(text.contains("the gradients ran into a wall"), "{text}");
    assert!(begun.elapsed().as_secs() < 5);
}

#[test]
fn a_second_backward_pass_is_an_error() {
    let text = failure(|net, _, rank| {
        let _ = net.loss(batch(0, rank, 2), true).backward();
        let _ = net.loss(batch(1, rank, 2), true).backward();
    });
    assert!(text.contains("`shared.weight` is used after a backward pass had its gradient"), "{text}");
    assert!(text.contains("nearest legal: without overlap"), "{text}");
}

#[test]
fn a_gradient_after_the_sum_has_left_is_an_error() {
    let text = failure(|net, reducer, rank| {
        let _ = net.loss(batch(0, rank, 2), true).backward();
        reducer.pause();
        let more = backward(net, net.loss(batch(1, rank, 2), true));
        reducer.end_pass(net, more);
    });
    assert!(text.contains(".weight` has one more gradient after its sum has left"), "{text}");
}

/// A pipeline's order in which the gradients of earlier micro-batches come too late: buckets leave in the second pass.
#[test]
fn earlier_gradients_after_the_sum_has_left_are_an_error() {
    let text = failure(|net, reducer, rank| {
        let loss = net.loss(batch(0, rank, 2), true);
        reducer.pause();
        let earlier = backward(net, net.loss(batch(1, rank, 2), true));
        reducer.resume(net, GradientsParams::new());
        let left = backward(net, loss);
        reducer.pause();
        reducer.resume(net, earlier);
        reducer.end_pass(net, left);
    });
    assert!(text.contains(".weight` come after its sum has left, and would be lost"), "{text}");
    assert!(text.contains("nearest legal: begin_pass, the forward pass, pause, resume"), "{text}");
}

#[test]
fn earlier_gradients_outside_of_a_pass_are_an_error() {
    let text = failure(|net, reducer, rank| {
        let grads = backward(net, net.loss(batch(0, rank, 2), true));
        let earlier = reducer.end_pass(net, grads);
        reducer.resume(net, earlier);
    });
    assert!(text.contains("would be lost outside of a pass; nearest legal: begin_pass"), "{text}");
    let text = failure(|net, reducer, _| {
        reducer.end_pass(net, GradientsParams::new());
        reducer.end_pass(net, GradientsParams::new());
    });
    assert!(text.contains("a pass ends that was not begun; nearest legal: begin_pass"), "{text}");
}
