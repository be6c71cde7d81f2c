#include <vector>

#include "grouped.h"

extern Variant const forward_gated[], forward_scattered[], backward_plain[], backward_scattered[], wgrad[];

static std::vector<Variant> const& all() {
    static std::vector<Variant> const found = [] {
        std::vector<Variant> list;
        for (Variant const* table : {forward_gated, forward_scattered, backward_plain, backward_scattered, wgrad})
            for (; table->name != nullptr; ++table) list.push_back(*table);
        return list;
    }();
    return found;
}

int variant_count() { return int(all().size()); }
char const* variant_name(int i) { return all()[i].name; }
int variant_launch(int i, Call const* call) { return all()[i].launch(*call); }
int variant_clusters(int i) { return all()[i].clusters(); }
