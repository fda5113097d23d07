// A network of a simulation: what is sent arrives late, in another order, twice, or never; what was
// sent to a process that restarted meanwhile does not arrive.
#ifndef CERTKV_TESTS_SIMULATION_FAKE_NETWORK_H_
#define CERTKV_TESTS_SIMULATION_FAKE_NETWORK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <utility>

namespace certkv {

struct NetworkFaults {
  double loss = 0.05;
  double duplication = 0.05;
  int64_t delay_ms_max = 120;
};

// Threads: none.
class FakeNetwork {
 public:
  FakeNetwork(const NetworkFaults& faults, uint64_t seed) : faults_(faults), random_(seed) {}

  // `deliver` runs when the message arrives, which may be more than once.
  void Send(int64_t now_ms, std::function<void()> deliver) {
    const int copies = Uniform() < faults_.duplication ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      if (Uniform() < faults_.loss) continue;
      const auto delay_ms =
          static_cast<int64_t>(Uniform() * Uniform() * static_cast<double>(faults_.delay_ms_max));
      under_way_.emplace(std::pair(now_ms + delay_ms, ++sequence_), deliver);
    }
  }
  // Delivers what has arrived by now.
  void Deliver(int64_t now_ms) {
    while (!under_way_.empty() && under_way_.begin()->first.first <= now_ms) {
      const auto deliver = std::move(under_way_.begin()->second);
      under_way_.erase(under_way_.begin());
      ++delivered_;
      deliver();
    }
  }
  int64_t delivered() const { return delivered_; }

 private:
  double Uniform() { return std::uniform_real_distribution<double>(0, 1)(random_); }

  const NetworkFaults faults_;
  std::mt19937_64 random_;
  std::map<std::pair<int64_t, int64_t>, std::function<void()>> under_way_;
  int64_t sequence_ = 0;
  int64_t delivered_ = 0;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SIMULATION_FAKE_NETWORK_H_
