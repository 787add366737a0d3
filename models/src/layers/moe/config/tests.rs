use super::*;

fn config() -> MoeConfig {
    let init = Init::Normal { std: 0.1 };
    MoeConfig {
        hidden: 8,
        intermediate: 16,
        experts: 8,
        kind: ExpertKind::SwiGlu,
        router: RouterConfig::new(2),
        capacity: None,
        dispatcher: Dispatcher::AllToAll,
        shared: None,
        input: init,
        output: init,
    }
}

#[test]
fn contradictory_sizes_are_refused() {
    assert_eq!(config().check(), Ok(()));
    let refuse = |config: MoeConfig| config.check().unwrap_err().to_string();
    let router = |router| MoeConfig { router, ..config() };
    assert_eq!(
        refuse(router(RouterConfig::new(9))),
        "num_experts_per_tok = 9 is not at most num_experts; nearest legal: 8"
    );
    let groups = |groups, top_k| Some(ExpertGroups { groups, top_k, best: 2 });
    assert_eq!(
        refuse(router(RouterConfig { groups: groups(3, 1), ..RouterConfig::new(2) })),
        "n_group = 3 does not divide num_experts = 8; nearest legal: 2, 4"
    );
    assert_eq!(
        refuse(router(RouterConfig { groups: groups(8, 1), ..RouterConfig::new(2) })),
        "num_experts_per_tok = 2 is not at most the experts of topk_group groups; nearest legal: 1"
    );
    let capacity = Some(Capacity { factor: 0.0, policy: DropPolicy::Probs, pad: false });
    assert!(refuse(MoeConfig { capacity, ..config() }).contains("moe_capacity_factor = 0 is not positive"));
}
