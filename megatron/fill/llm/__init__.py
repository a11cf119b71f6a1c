"""Language models as fill jobs: token trees and how they are verified (SpecInfer, arXiv 2305.09781)."""
