#include "ulysses/partition/head_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "ulysses/base/error.h"

namespace ulysses::partition {
namespace {

std::vector<int64_t> sizes(const std::vector<Range>& ranges) {
  std::vector<int64_t> result;
  for (const Range& range : ranges) result.push_back(range.size());
  return result;
}

struct Heads {
  int64_t num_heads, num_kv_heads, degree;
  int64_t g() const { return num_heads / num_kv_heads; }
  std::string name() const {
    return "H=" + std::to_string(num_heads) + " H_kv=" + std::to_string(num_kv_heads) + " U=" + std::to_string(degree);
  }
};

template <typename Check>
void for_all_heads(Check check) {
  for (int64_t heads = 1; heads <= 64; ++heads) {
    for (int64_t kv_heads = 1; kv_heads <= heads; ++kv_heads) {
      if (heads % kv_heads != 0) continue;
      for (int64_t degree = 1; degree <= 16; ++degree) {
        const Heads item{heads, kv_heads, degree};
        check(item, head_ranges(heads, kv_heads, degree));
        if (testing::Test::HasFailure()) FAIL() << item.name();
      }
    }
  }
}

TEST(HeadRanges, TileAndBalanceWithinOne) {
  for_all_heads([](const Heads& item, const HeadRanges& ranges) {
    ASSERT_EQ(ranges.query.size(), static_cast<size_t>(item.degree));
    ASSERT_EQ(ranges.kv.size(), static_cast<size_t>(item.degree));
    int64_t next = 0;
    for (const Range& range : ranges.query) {
      EXPECT_EQ(range.begin, next);
      EXPECT_GE(range.size(), item.num_heads / item.degree);
      EXPECT_LE(range.size(), (item.num_heads + item.degree - 1) / item.degree);
      next = range.end;
    }
    EXPECT_EQ(next, item.num_heads);
  });
}

TEST(HeadRanges, EveryQueryHeadFindsItsKvHeadAndNoneIsIdle) {
  for_all_heads([](const Heads& item, const HeadRanges& ranges) {
    std::vector<bool> held(static_cast<size_t>(item.num_kv_heads), false);
    for (size_t r = 0; r < ranges.query.size(); ++r) {
      const Range& kv = ranges.kv[r];
      std::vector<bool> needed(static_cast<size_t>(item.num_kv_heads), false);
      for (int64_t head = ranges.query[r].begin; head < ranges.query[r].end; ++head) {
        const int64_t kv_head = head / item.g();
        EXPECT_TRUE(kv.begin <= kv_head && kv_head < kv.end);
        needed[static_cast<size_t>(kv_head)] = held[static_cast<size_t>(kv_head)] = true;
      }
      EXPECT_EQ(std::count(needed.begin(), needed.end(), true), kv.size()) << "an unneeded KV head would travel";
      EXPECT_EQ(kv.empty(), ranges.query[r].empty());
      EXPECT_TRUE(0 <= kv.begin && kv.begin <= kv.end && kv.end <= item.num_kv_heads);
    }
    EXPECT_EQ(std::count(held.begin(), held.end(), true), item.num_kv_heads);
  });
}

TEST(HeadRanges, OverlapMeansThatAKvHeadIsHeldTwice) {
  for_all_heads([](const Heads& item, const HeadRanges& ranges) {
    std::vector<int> holders(static_cast<size_t>(item.num_kv_heads), 0);
    for (const Range& kv : ranges.kv) {
      for (int64_t head = kv.begin; head < kv.end; ++head) ++holders[static_cast<size_t>(head)];
    }
    EXPECT_EQ(overlaps(ranges.kv), *std::max_element(holders.begin(), holders.end()) > 1);
  });
}

// Most cuts that any balanced choice of the longer ranks puts on group borders, by trying every choice.
int64_t most_border_cuts(const Heads& item) {
  const int64_t base = item.num_heads / item.degree;
  const int64_t extra = item.num_heads % item.degree;
  int64_t best = 0;
  for (uint32_t longer = 0; longer < (1u << item.degree); ++longer) {
    if (__builtin_popcount(longer) != extra) continue;
    int64_t cut = 0, borders = 0;
    for (int64_t r = 0; r + 1 < item.degree; ++r) {
      cut += base + ((longer >> r) & 1u);
      borders += cut % item.g() == 0 ? 1 : 0;
    }
    best = std::max(best, borders);
  }
  return best;
}

TEST(HeadRanges, CutsOnAsManyGroupBordersAsTheBalanceAllows) {
  for_all_heads([](const Heads& item, const HeadRanges& ranges) {
    if (item.degree > 8 || item.num_heads > 40) return;
    int64_t borders = 0;
    for (size_t r = 1; r < ranges.query.size(); ++r) borders += ranges.query[r].begin % item.g() == 0 ? 1 : 0;
    EXPECT_EQ(borders, most_border_cuts(item));
  });
}

TEST(HeadRanges, KnownCuts) {
  EXPECT_EQ(sizes(head_ranges(30, 6, 4).query), (std::vector<int64_t>{8, 7, 8, 7}));  // the cut at 15 is a border
  EXPECT_EQ(head_ranges(30, 6, 4).kv, (std::vector<Range>{{0, 2}, {1, 3}, {3, 5}, {4, 6}}));
  EXPECT_EQ(sizes(head_ranges(30, 30, 4).query), (std::vector<int64_t>{8, 8, 7, 7}));
  EXPECT_EQ(sizes(head_ranges(8, 1, 2).query), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(head_ranges(8, 1, 2).kv, (std::vector<Range>{{0, 1}, {0, 1}}));
  EXPECT_EQ(sizes(head_ranges(2, 1, 4).query), (std::vector<int64_t>{1, 1, 0, 0}));
  EXPECT_FALSE(overlaps(head_ranges(8, 4, 4).kv));
  EXPECT_TRUE(overlaps(head_ranges(8, 2, 4).kv));
}

TEST(HeadRanges, BorderCutWhereLongerRanksFirstWouldTear) {
  // Groups of 3; longer ranks first would own 2, 2, 1, 1 heads and cut at 2, 4, 5: no border. 2, 1, 2, 1 cuts at 3.
  EXPECT_EQ(sizes(head_ranges(6, 2, 4).query), (std::vector<int64_t>{2, 1, 2, 1}));
  EXPECT_EQ(head_ranges(6, 2, 4).kv, (std::vector<Range>{{0, 1}, {0, 1}, {1, 2}, {1, 2}}));
}

TEST(HeadRuns, CoverExactlyInAtMostThreeUniformRuns) {
  for_all_heads([](const Heads& item, const HeadRanges& ranges) {
    for (size_t r = 0; r < ranges.query.size(); ++r) {
      const Range& query = ranges.query[r];
      const Range& kv = ranges.kv[r];
      const auto runs = head_runs(query, kv, item.g());
      EXPECT_LE(runs.size(), 3u);
      int64_t next = 0;
      for (const HeadRun& run : runs) {
        EXPECT_EQ(run.query.begin, next);
        next = run.query.end;
        ASSERT_GT(run.kv.size(), 0);
        ASSERT_EQ(run.query.size() % run.kv.size(), 0);
        EXPECT_TRUE(0 <= run.kv.begin && run.kv.end <= kv.size());
        const int64_t per_kv = run.query.size() / run.kv.size();
        for (int64_t head = run.query.begin; head < run.query.end; ++head) {
          const int64_t by_run = run.kv.begin + (head - run.query.begin) / per_kv;
          EXPECT_EQ(by_run + kv.begin, (head + query.begin) / item.g());
        }
      }
      EXPECT_EQ(next, query.size());
    }
  });
}

TEST(HeadRuns, KnownRuns) {
  // Heads 3 … 13 of groups of 4: one of group 0, groups 1 and 2 whole, two of group 3.
  EXPECT_EQ(head_runs({3, 14}, {0, 4}, 4),
            (std::vector<HeadRun>{{{0, 1}, {0, 1}}, {{1, 9}, {1, 3}}, {{9, 11}, {3, 4}}}));
  EXPECT_EQ(head_runs({5, 7}, {1, 2}, 4), (std::vector<HeadRun>{{{0, 2}, {0, 1}}}));
  EXPECT_EQ(head_runs({4, 12}, {1, 3}, 4), (std::vector<HeadRun>{{{0, 8}, {0, 2}}}));
  EXPECT_TRUE(head_runs({4, 4}, {1, 1}, 4).empty());
}

TEST(HeadRanges, RefusesHeadsThatDoNotGroupCP023AndDegreesCP006) {
  for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{7, 2}, {0, 1}, {4, 0}, {-4, 2}, {2, 4}}) {
    try {
      head_ranges(heads, kv_heads, 2);
      FAIL() << heads << ' ' << kv_heads;
    } catch (const base::Error& error) {
      EXPECT_EQ(error.id(), "CP023");
    }
  }
  try {
    head_ranges(8, 2, 0);
    FAIL();
  } catch (const base::Error& error) {
    EXPECT_EQ(error.id(), "CP006");
  }
}

}  // namespace
}  // namespace ulysses::partition
